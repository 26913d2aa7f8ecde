"""Prune, then export: by `torch.export` and to ONNX, for any batch size. Both are compared with the module.

python examples/export.py --output smaller.onnx

It needs `pip install '.[export]'`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import digits
import onnxruntime
import torch
from torch import Tensor

import recoup

# Largest difference that counts as agreement: float32, summed in another order.
AGREEMENT = 1e-4


def main(arguments: Sequence[str] | None = None) -> None:
    """Export the smaller network twice, and see that three forms of it say the same."""
    options = parse(arguments)
    data = digits.load()
    network = digits.trained_network(data.train, options.epochs)
    result = recoup.prune(network, data.train, budget=recoup.Budget(macs=options.keep), method=options.method)
    print(result.report)

    smaller, images = result.model.eval(), data.test[0][0]
    program = torch.export.export(smaller, (images,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    require_same("torch.export", program.module()(images[:7]), smaller(images[:7]))
    with tempfile.TemporaryDirectory() as scratch:
        path = options.output or Path(scratch, "smaller.onnx")
        torch.onnx.export(program, f=path, verbose=False)
        require_same("ONNX Runtime", run_onnx(path, images[:7]), smaller(images[:7]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune, then export by torch.export and to ONNX.")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the MACs to keep")
    parser.add_argument("--epochs", type=int, default=4, help="of training")
    parser.add_argument("--output", type=Path, help="where to write the ONNX file")
    parser.add_argument("--method", default="best", help="best, fast, paper or released")
    return parser.parse_args(arguments)


def run_onnx(path: Path, images: Tensor) -> Tensor:
    """What ONNX Runtime makes of the images."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(scores)


def require_same(name: str, actual: Tensor, expected: Tensor) -> None:
    """Print how far two results are apart; stop where they disagree."""
    difference = float((actual - expected).detach().abs().max())
    print(f"{name}: largest difference {difference:.1e}")
    if difference > AGREEMENT:
        raise SystemExit(f"{name} and the module disagree.")


if __name__ == "__main__":
    main()
