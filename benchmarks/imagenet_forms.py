"""torchvision networks at 224 x 224 with random weights: half their MACs gone on a CPU, exported, run by ONNX Runtime.

python -m benchmarks.imagenet_forms [resnet18 resnet50 vgg16_bn] [--images 64]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from tests.torchvision_operators import define_missing_torchvision_operators
from torch import Tensor, nn

import recoup
from recoup.cli.data import open_data
from recoup.cli.models import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["resnet18", "resnet50", "vgg16_bn"])
    parser.add_argument("--images", type=int, default=64)
    options = parser.parse_args()
    define_missing_torchvision_operators()
    print("| network | MACs | kept | time by stage | proof | torch.export | ONNX Runtime | speed-up, batch 1 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.names:
        print(row(name, options.images), flush=True)


def row(name: str, images: int) -> str:
    """Prune one network and check what can be done with the result."""
    opened = open_model(f"torchvision:{name}")
    data = open_data(f"noise:{images}", opened.input, batch_size=16)
    result = recoup.prune(opened.model, data, budget=recoup.Budget(macs=0.5), method="paper")
    smaller, x = result.model.eval(), torch.randn(2, *opened.input.shape)
    seconds = result.report.seconds
    total = sum(seconds.values())
    print(f"{name}: {total:.0f} s", file=sys.stderr)
    stages = ", ".join(f"{stage} {value / total:.0%}" for stage, value in seconds.items() if value >= 0.01 * total)
    return (
        f"| {name} | {result.report.before.macs / 1e9:.2f} G | {1 - result.report.macs_removed:.1%} | "
        f"{stages} | {result.report.proof.difference:.0e} | {exported(smaller, x):.0e} | {in_onnx(smaller, x):.0e} | "
        f"{latency(opened.model, x[:1]) / latency(smaller, x[:1]):.2f}x |"
    )


def exported(model: nn.Module, x: Tensor) -> float:
    """Relative difference between the model and its torch.export program."""
    program = torch.export.export(model, (x,))
    return relative(program.module()(x), model(x))


def in_onnx(model: nn.Module, x: Tensor) -> float:
    """Relative difference between the model and its ONNX form in ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return relative(torch.from_numpy(np.asarray(output)), model(x))


def relative(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


@torch.no_grad()
def latency(model: nn.Module, x: Tensor, repeats: int = 7) -> float:
    """Median seconds of one forward pass."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


if __name__ == "__main__":
    main()
