"""Prune a timm network, named on the command line, to a share of its MACs.

    python examples/timm_budget.py
    python examples/timm_budget.py --model efficientnet_lite0 --weights FILE --pictures FOLDER --size 224 --keep 0.7

FOLDER holds pictures without labels. Without it, noise stands for them, and without weights the network is random:
that shows the interface, not what pruning costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from PIL import Image
from torch import Tensor, nn

import recoup


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at the network, prune it, and say how far its predictions have moved."""
    options = parse(arguments)
    torch.manual_seed(0)
    network = timm.create_model(options.model, checkpoint_path=str(options.weights or "")).eval()
    pictures = read(options.pictures, network, options.size) if options.pictures else noise(options.size)
    calibration, others = pictures[:-1], pictures[-1:]

    print(recoup.inspect(network, others[0]).summary)
    result = recoup.prune(
        network,
        calibration,
        budget=recoup.Budget(macs=options.keep),
        method=recoup.Fast(multiple_of=options.multiple_of),
    )
    print(result.report)
    print(f"divergence from the original on other pictures: {recoup.divergence(result.model, network, others):.4f}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune a timm network to a share of its MACs.")
    parser.add_argument("--model", default="mobilenetv3_small_050", help="a name that timm knows")
    parser.add_argument("--weights", type=Path, help="a checkpoint that timm reads")
    parser.add_argument("--pictures", type=Path, help="a folder of pictures")
    parser.add_argument("--size", type=int, default=64, help="height and width that the network is fed with")
    parser.add_argument("--keep", type=float, default=0.7, help="share of the MACs to keep")
    parser.add_argument("--multiple-of", type=int, default=8, help="widths are multiples of this")
    return parser.parse_args(arguments)


def read(folder: Path, network: nn.Module, size: int, batch_size: int = 32) -> list[Tensor]:
    """Batches of pictures, prepared as the network was trained."""
    settings = {**timm.data.resolve_data_config(model=network), "input_size": (3, size, size)}
    prepare = timm.data.create_transform(**settings)
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    return list(torch.stack([prepare(Image.open(path).convert("RGB")) for path in paths]).split(batch_size))


def noise(size: int, batches: int = 3, batch_size: int = 16) -> list[Tensor]:
    """Batches of N(0, 1) values in the place of pictures."""
    return [torch.randn(batch_size, 3, size, size) for _ in range(batches)]


if __name__ == "__main__":
    main()
