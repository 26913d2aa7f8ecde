"""A small language model, and what is left of it when its MLPs and heads lose half of their MACs.

    python -m benchmarks.language --checkpoints DIR --out benchmarks/results/language.json --docs docs

    pip install transformers==5.23.0 torch-pruning==1.6.1

The model is transformers' Llama at a small size. It reads bytes and is trained here, on the reference of the language
that Python carries with it (`pydoc_data.topics`). Every eighth topic is held out; perplexity is per byte, on all of
it. Calibration is by text that it was trained on. The budget is in MACs of the whole model: what cannot be pruned
stays, and of the rest half goes.

- magnitude: our surgery, channels and heads by the size of their weights, the same share of every group, no refit;
- Torch-Pruning: group norms, the same ratio for the MLP of every layer, to the same MACs. Heads stay: it looks for what
  depends on a query's rows through the rotary embedding for longer than ten minutes;
- fast, best: as a user calls them. With `keep_config` widths are the same in all layers, and the result goes through
  `save_pretrained` and `from_pretrained` before it is measured. With `streams` the residual stream is turned into its
  principal components and may lose channels too, at the same MACs.

Every result generates text with its cache of keys and values, and without it; the texts have to be the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import recoup
from benchmarks.machine import versions
from benchmarks.pages import publish
from benchmarks.rows import Plain, Store
from recoup.cli.importing import import_library
from recoup.errors import ModelError

ORIGINAL, MAGNITUDE, RIVAL = "original", "magnitude", "Torch-Pruning"
FAST, BEST, FAST_ALIKE, BEST_ALIKE = "fast", "best", "fast, keep_config", "best, keep_config"
FAST_STREAMS, BEST_STREAMS = "fast, streams", "best, streams"
METHODS = (ORIGINAL, MAGNITUDE, RIVAL, FAST, BEST, FAST_ALIKE, BEST_ALIKE, FAST_STREAMS, BEST_STREAMS)
# Of what can be pruned.
SHARE = 0.5
BLOCK, BATCH, STEPS, RATE = 128, 16, 600, 4e-3
CALIBRATION = 128
HELD_OUT = 8
PROMPT, GENERATED = 32, 32
SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 12, "max_position_embeddings": 256,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Who prunes, and the seed of training and of the calibration sample."""

    method: str
    seed: int


@dataclass(frozen=True, slots=True)
class Row:
    """Share of all MACs kept, perplexity per byte on held-out text, seconds, and widths: MLPs, heads, the stream."""

    case: Case
    kept: float
    perplexity: float
    seconds: float
    widths: tuple[int, ...]

    def plain(self) -> Plain:
        """For the file."""
        return {**asdict(self.case), **{name: value for name, value in asdict(self).items() if name != "case"}}


def main() -> None:
    options = parse()
    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    store = Store(options.out, versions(), lambda row: Case(row["method"], row["seed"]))
    for seed in options.seeds:
        cases = store.waiting(Case(method, seed) for method in options.methods)
        if cases:
            model = trained(seed, options.checkpoints, options.steps)
            for case in cases:
                store.add(measured(model, case))
    publish(table(store.rows), "language", None if options.docs is None else options.docs / "language.md")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--checkpoints", type=Path, required=True, help="where trained models are kept")
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument("--docs", type=Path, help="folder of the page with the table")
    return parser.parse_args()


def texts() -> tuple[Tensor, Tensor]:
    """The bytes to train on and those held out."""
    parts = ["".join(topics[name] for name in sorted(topics)[start::HELD_OUT]) for start in range(HELD_OUT)]
    held, *seen = (torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8).long() for part in parts)
    return torch.cat(seen), held


def blocks(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pieces of the text (count, BLOCK), drawn at random."""
    starts = torch.randint(len(text) - BLOCK, (count, 1), generator=generator)
    return text[starts + torch.arange(BLOCK)]


def fresh() -> Any:
    """The model before training."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    library = transformers()
    return library.LlamaForCausalLM(library.LlamaConfig(**SIZES, **ids))


def trained(seed: int, folder: Path, steps: int) -> nn.Module:
    """The trained model of that seed, from its file or trained now."""
    place = folder / f"language-{seed}-{steps}.safetensors"
    torch.manual_seed(seed)
    model: nn.Module = fresh()
    if place.exists():
        model.load_state_dict(load_file(place))
        return model.eval()
    start, (seen, _) = time.perf_counter(), texts()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = blocks(seen, BATCH, generator)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"trained in {time.perf_counter() - start:.0f} s, loss {float(loss.detach()):.3f}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), place)
    return model.eval()


def measured(model: nn.Module, case: Case) -> Row:
    """What a method makes of the model."""
    seen, held = texts()
    parts = blocks(seen, CALIBRATION, _drawn(case.seed)).split(32)
    calibration = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]
    whole = held[: len(held) // BLOCK * BLOCK].view(-1, BLOCK)
    start = time.perf_counter()
    smaller = _pruners(model, calibration)[case.method]()
    seconds = time.perf_counter() - start
    require_same_text(smaller, whole[:4, :PROMPT])
    perplexity = recoup.perplexity(smaller, [{"input_ids": part} for part in whole.split(64)])
    return Row(case, macs(smaller) / macs(model), perplexity, seconds, widths(smaller))


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _pruners(model: nn.Module, calibration: list[dict[str, Tensor]]) -> dict[str, Callable[[], Any]]:
    locked = recoup.inspect(model, calibration[0], keep_class=True).macs_locked
    kept = locked + SHARE * (1 - locked)
    uncompensated = recoup.Paper(selector="l2", weighting="none", recovery="none")

    def ours(method: Any, **options: Any) -> Any:
        return recoup.prune(model, calibration, budget=recoup.Budget(macs=kept), method=method, **options).model

    return {
        ORIGINAL: lambda: model,
        MAGNITUDE: lambda: ours(uncompensated, keep_class=True),
        RIVAL: lambda: torch_pruned(model, calibration[0]["input_ids"], kept),
        FAST: lambda: ours("fast", keep_class=True),
        BEST: lambda: ours("best", keep_class=True),
        FAST_ALIKE: lambda: reloaded(ours("fast", keep_config=True)),
        BEST_ALIKE: lambda: reloaded(ours("best", keep_config=True)),
        FAST_STREAMS: lambda: ours("fast", keep_class=True, streams=True),
        BEST_STREAMS: lambda: ours("best", keep_class=True, streams=True),
    }


def reloaded(model: Any) -> nn.Module:
    """The model after a round trip through a folder of its library."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again: nn.Module = type(model).from_pretrained(folder).eval()
        return again


def torch_pruned(model: Any, example: Tensor, kept: float) -> Any:
    """By Torch-Pruning: the same share of every MLP's channels, until so much is `kept` of all MACs."""
    twin: Any = fresh()
    twin.load_state_dict(model.state_dict())
    twin.eval().config.use_cache = False
    mlps = [layer.mlp for layer in twin.model.layers]
    inside = {part for mlp in mlps for part in (mlp.gate_proj, mlp.up_proj)}
    ratio = (1 - kept) * macs(model) / (3 * BLOCK * sum(mlp.gate_proj.weight.numel() for mlp in mlps))
    library = import_library("torch_pruning", "torch-pruning==1.6.1", ModelError)
    pruner = library.pruner.BasePruner(
        twin,
        example[:1],
        importance=library.importance.GroupMagnitudeImportance(p=2),
        global_pruning=False,
        pruning_ratio=ratio,
        root_module_types=[nn.Linear],
        ignored_layers=[part for part in twin.modules() if isinstance(part, nn.Linear) and part not in inside],
    )
    pruner.step()
    twin.config.use_cache = True
    return twin


def require_same_text(model: Any, prompts: Tensor) -> None:
    """Refuse a model that writes something else with its cache than without it."""
    settings = {"max_new_tokens": GENERATED, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
    with torch.no_grad():
        with_cache, without = (model.generate(prompts, use_cache=cached, **settings) for cached in (True, False))
    assert with_cache.shape[1] == PROMPT + GENERATED and torch.equal(with_cache, without)


def macs(model: Any) -> int:
    """Multiply-accumulates of the linear layers and of attention, for a block."""
    linear: int = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    heads = sum(int(layer.self_attn.q_proj.out_features) for layer in model.model.layers)
    return BLOCK * linear + 2 * BLOCK * BLOCK * heads


def widths(model: Any) -> tuple[int, ...]:
    """Hidden channels of every layer, then its heads, then the channels of the stream."""
    layers, head = model.model.layers, SIZES["head_dim"]
    mlps = [layer.mlp.gate_proj.out_features for layer in layers]
    heads = [layer.self_attn.q_proj.out_features // head for layer in layers]
    return (*mlps, *heads, model.model.embed_tokens.embedding_dim)


def transformers() -> Any:
    """The library that the model is of."""
    return import_library("transformers", "transformers==5.23.0", ModelError)


def table(rows: Sequence[Plain]) -> str:
    """Perplexity by method, every seed a column."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [f"| method | MACs kept | {' | '.join(f'perplexity, seed {seed}' for seed in seeds)} |"]
    lines.append("|---" * (2 + len(seeds)) + "|")
    return "\n".join([*lines, *_lines(rows, seeds)])


def _lines(rows: Sequence[Plain], seeds: Sequence[int]) -> Iterator[str]:
    for method in METHODS:
        mine = {row["seed"]: row for row in rows if row["method"] == method}
        if mine:
            kept = sum(row["kept"] for row in mine.values()) / len(mine)
            found = " | ".join(f"{mine[seed]['perplexity']:.3f}" if seed in mine else "-" for seed in seeds)
            yield f"| {method} | {kept:.1%} | {found} |"


if __name__ == "__main__":
    main()
