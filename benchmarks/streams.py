"""Residual streams under LayerNorm and RMSNorm: what it costs to cut them, beside cutting everything else.

    python -m benchmarks.streams --out benchmarks/results/streams.json --docs docs

Small networks, trained here within minutes on one CPU core: byte-level language models on the standard library's own
text, and a vision transformer on the digits of scikit-learn. Part `alone` cuts the stream and nothing else to a share
of its width; part `budget` cuts the network to a share of its MACs. Ways: `elsewhere` leaves streams alone, `channels`
cuts them as they are, `components` turns them first. The divergence from the original is measured on data that was
neither trained on nor fitted to.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recoup
from benchmarks.machine import versions
from benchmarks.pages import publish
from benchmarks.rows import Plain, Store

NETWORKS = ("bytes, RMSNorm", "bytes, LayerNorm", "digits, LayerNorm")
WIDTHS, SHARES = (0.95, 0.85, 0.7, 0.5), (0.85, 0.7, 0.5, 0.35)
LENGTH, BATCH, CALIBRATION, TEST = 64, 32, 96, 64


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a part of the benchmark, a way, and the share of the width or of the MACs to keep."""

    network: str
    part: str
    way: str
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """`kl` in nats from the original, `score` in nats per byte or points of accuracy, of the original in `before`."""

    case: Case
    kl: float
    score: float
    before: float
    macs: float
    stream: str
    seconds: float

    def plain(self) -> Plain:
        """For the file."""
        return {**asdict(self.case), **{name: value for name, value in asdict(self).items() if name != "case"}}


class Attention(nn.Module):
    def __init__(self, width: int, head: int, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head, self.causal = head, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a module returns anything


class Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module], causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.attention = Attention(width, 16, causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]  # as above


class Language(nn.Module):
    """Scores of the next byte at the last place."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, norm, True) for _ in range(blocks)))
        self.norm, self.head = norm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.05)

    def everywhere(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.tokens(x) + self.places[: x.shape[1]]))  # type: ignore[no-any-return]  # as above

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.everywhere(x)[:, -1])  # type: ignore[no-any-return]  # as above


class Digits(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], width: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, norm, False) for _ in range(blocks)))
        self.norm, self.head = norm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]  # as above


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A network with what it is calibrated on, test inputs with their answers, and the group of its stream."""

    model: nn.Module
    calibration: Tensor
    inputs: Tensor
    answers: Tensor
    stream: str


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    settings = {**versions(), "steps": options.steps, "method": options.method}
    store = Store(options.out, settings, lambda row: Case(*(row[name] for name in Case.__slots__)))
    for network in options.networks:
        if waiting := store.waiting(cases(network)):
            trained = TRAINED[network](options.steps)
            for case in waiting:
                store.add(measured(trained, case, options.method))
    publish(table(store.rows), "streams", None if options.docs is None else options.docs / "lab" / "streams.md")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--steps", type=int, default=1200, help="of training")
    parser.add_argument("--method", default="fast")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path)
    return parser.parse_args(words)


def cases(network: str) -> list[Case]:
    alone = [Case(network, "alone", way, share) for way in ("components", "channels") for share in WIDTHS]
    return alone + [Case(network, "budget", way, share) for share in SHARES for way in ("components", "elsewhere")]


def measured(trained: Trained, case: Case, method: str) -> Row:
    start = time.perf_counter()
    model = recoup.rotate(trained.model, [trained.calibration]) if case.way == "components" else trained.model
    smaller, plan, macs = pruned(model, trained, case, method)
    keep = plan.keep[trained.stream]
    with torch.no_grad():
        before, after = (net(trained.inputs).log_softmax(-1) for net in (trained.model, smaller))
    kl = float((before.exp() * (before - after)).sum(-1).mean())
    stream, seconds = f"{int(keep.sum())} of {len(keep)}", time.perf_counter() - start
    return Row(case, kl, score(trained, after), score(trained, before), macs, stream, seconds)


def pruned(model: nn.Module, trained: Trained, case: Case, method: str) -> tuple[nn.Module, recoup.Plan, float]:
    """Step by step, as `channels` are cut without being turned."""
    batch = trained.calibration
    traced = recoup.trace(model, batch, streams=case.way != "elsewhere")
    chosen = recoup.Fast() if method == "fast" else recoup.Best()
    seen = recoup.calibrate(traced, recoup.split(model, [batch]), chosen)
    width = traced.structure.group(trained.stream).width
    if case.part == "alone":
        goal = recoup.Goal(widths={trained.stream: round(case.share * width)})
    else:
        goal = recoup.Goal(budget=recoup.Budget(macs=case.share))
    rankings = recoup.rank(seen)
    found = recoup.recover(seen, recoup.allocate(seen, rankings, goal))
    smaller = recoup.apply(model, found.plan)
    recoup.verify(model, found.plan, smaller, batch[:4])
    return smaller.eval(), found.plan, macs_of(smaller, trained.inputs) / macs_of(trained.model, trained.inputs)


def macs_of(model: nn.Module, inputs: Tensor) -> float:
    """Of one sample, as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(inputs[:1])
    return float(counter.get_total_flops()) / 2


def score(trained: Trained, found: Tensor) -> float:
    """Nats per byte, or points of accuracy."""
    if found.shape[1] == 10:
        return 100 * float((found.argmax(1) == trained.answers).float().mean())
    return float(F.nll_loss(found, trained.answers))


def language(norm: Callable[[int], nn.Module], steps: int) -> Trained:
    """Trained on nine of ten files of the standard library, tested on the others."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    seen, new = (
        torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in some)), dtype=torch.uint8).long()
        for some in ([f for n, f in enumerate(files) if n % 10], files[::10])
    )
    torch.manual_seed(0)
    model = Language(norm)

    def loss(number: int) -> Tensor:
        texts = windows(seen, BATCH, LENGTH + 1, number)
        return F.cross_entropy(model.head(model.everywhere(texts[:, :-1])).flatten(0, 1), texts[:, 1:].flatten())

    train(model, loss, 3e-3, steps)
    tested, calibration = windows(new, 16 * TEST, LENGTH + 1, 1), windows(seen, 8 * CALIBRATION, LENGTH, 2)
    return Trained(model, calibration, tested[:, :-1], tested[:, -1], "tokens")


def windows(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + length] for start in starts])


def digits(norm: Callable[[int], nn.Module], steps: int) -> Trained:
    """Trained on 1,200 digits, shifted and with noise, tested on the other 597."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16 - 0.3
    answers = torch.tensor(found.target)[order]
    torch.manual_seed(0)
    model = Digits(norm)

    def loss(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        chosen = torch.randint(1200, (64,), generator=generator)
        shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
        noisy = images[chosen].roll(shift, (2, 3)) + 0.1 * torch.randn(64, 1, 8, 8, generator=generator)
        return F.cross_entropy(model(noisy), answers[chosen])

    train(model, loss, 2e-3, steps)
    return Trained(model, images[:1000], images[1200:], answers[1200:], "patches")


def train(model: nn.Module, loss: Callable[[int], Tensor], rate: float, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()


TRAINED: dict[str, Callable[[int], Trained]] = {
    "bytes, RMSNorm": partial(language, nn.RMSNorm),
    "bytes, LayerNorm": partial(language, nn.LayerNorm),
    "digits, LayerNorm": partial(digits, nn.LayerNorm),
}


def table(rows: Sequence[Plain]) -> str:
    """Both parts, as Markdown."""
    lines = [
        "| network | width of the stream | principal components | its own channels |",
        "|---|---|---|---|",
    ]
    lines += [_line(rows, n, "alone", s, ("components", "channels")) for n in NETWORKS for s in WIDTHS]
    lines += ["", "| network | MACs kept | streams too | elsewhere only |", "|---|---|---|---|"]
    lines += [_line(rows, n, "budget", s, ("components", "elsewhere")) for n in NETWORKS for s in SHARES]
    return "\n".join(line for line in lines if line != "-")


def _line(rows: Sequence[Plain], network: str, part: str, share: float, ways: tuple[str, str]) -> str:
    wanted = {"network": network, "part": part, "share": share}
    found = [next((r for r in rows if r["way"] == way and wanted.items() <= r.items()), None) for way in ways]
    if None in found:
        return "-"
    cells = [f"{r['kl']:.4f} ({r['score']:.4g}; stream {r['stream']})" for r in found if r is not None]
    return f"| {network} | {share:.0%} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
