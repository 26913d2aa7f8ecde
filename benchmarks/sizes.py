"""Whether standalone results follow the sizes of their inputs: the smaller network beside the masked original.

    python -m benchmarks.sizes                       # all that can be imported
    python -m benchmarks.sizes --network gpt2 segformer

Needs transformers, diffusers and ultralytics; what is not installed is left out. Random weights, small networks. Every
network is cut to half of its MACs without regard to its class, then called at other resolutions or lengths and other
numbers of samples. A call that the graph refuses with an InputError is told; anything else is a failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tests.torchvision_operators import define_missing_torchvision_operators
from torch import Tensor, nn

import recoup
from recoup.errors import InputError, VerificationError
from recoup.inputs.batches import inputs_of
from recoup.surgery.apply import masked
from recoup.surgery.comparison import compare
from recoup.surgery.verify import outputs

COUNTS = (1, 2, 5)
WORDS = 60


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a call of it for so many samples at a size, the size it is captured at, and others."""

    library: str
    build: Callable[[], nn.Module]
    call: Callable[[int, Any], Any]
    captured: Any
    others: tuple[Any, ...]


def main() -> None:
    options = parse()
    failed = [name for name in options.network if not all(examine(name, CASES[name]))]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def examine(name: str, case: Case) -> Iterator[bool]:
    """Whether each call agrees or is refused; a line for every one."""
    define_missing_torchvision_operators()
    if importlib.util.find_spec(case.library) is None:
        print(f"{name}: {case.library} is not installed")
        return
    torch.manual_seed(0)
    model = case.build().eval()
    batch, method = case.call(24, case.captured), recoup.Paper(classifier=True)
    result = recoup.prune(model, [batch], budget=recoup.Budget(macs=0.5), method=method, keep_class=False)
    print(f"{name}: {result.report.form or 'its own class holds all sizes of its channels'}")
    whole = masked(model, result.plan).eval()
    for size in (case.captured, *case.others):
        for count in COUNTS:
            told = compared(model, result, whole, case.call(count, size))
            print(f"  {count} x {size}: {told}")
            yield not told.startswith("FAILED")


def compared(model: nn.Module, result: recoup.Result, whole: nn.Module, batch: Any) -> str:
    """What a call of the smaller network gives beside the masked original.

    Where the masked original is a standalone graph at full size, that graph is compared with the model itself as well.
    """
    call, graph = inputs_of(batch, model), result.plan.graph
    host = model if graph is None or graph.host is None else graph.host.eval()
    with torch.no_grad():
        try:
            found = outputs(result.model, call)
        except InputError as error:
            return f"refused: {error}"
        try:
            difference = compare(outputs(whole, call), found).difference
            as_it_was = compare(outputs(model, call), outputs(host, call)).difference
        except VerificationError as error:
            return f"FAILED: {error}"
    return f"differs by {difference:.1e}, the graph from the model by {as_it_was:.1e}"


def gpt2() -> nn.Module:
    """Without a mask, for which it takes other ways at one sample than at several."""
    library = importlib.import_module("transformers")
    config = library.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    model: nn.Module = library.GPT2LMHeadModel(config)
    return model


def segformer() -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.SegformerConfig(
        hidden_sizes=[16, 16, 32, 32],
        depths=[1] * 4,
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
        num_labels=5,
    )
    model: nn.Module = library.SegformerForSemanticSegmentation(config)
    return model


def unet2d() -> nn.Module:
    model: nn.Module = importlib.import_module("diffusers").UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model


def yolov8() -> nn.Module:
    model: nn.Module = importlib.import_module("ultralytics").YOLO("yolov8n.yaml").model
    return model


def pixels(count: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(count, 3, *size)


CASES = {
    "gpt2": Case(
        "transformers", gpt2, lambda n, length: {"input_ids": torch.randint(WORDS, (n, length))}, 10, (3, 17, 64)
    ),
    "segformer": Case(
        "transformers", segformer, lambda n, size: {"pixel_values": pixels(n, size)}, (64, 64),
        ((96, 64), (128, 160), (192, 96), (32, 32)),
    ),
    "unet2d": Case(
        "diffusers", unet2d, lambda n, size: {"sample": pixels(n, size), "timestep": torch.randint(100, (n,))},
        (32, 32), ((16, 48), (64, 32), (24, 24)),
    ),
    "yolov8": Case("ultralytics", yolov8, pixels, (64, 64), ((96, 64), (128, 128), (160, 96), (32, 160))),
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=CASES, default=list(CASES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
