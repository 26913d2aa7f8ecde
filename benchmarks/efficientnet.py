"""EfficientNet-Lite0 on ImageNet images at 80, 70 and 60 % of its MACs, without retraining, beside other methods.

    python -m benchmarks.efficientnet --images DIR --out benchmarks/results/efficientnet.json

DIR holds two folders, `calibration` and `validation`, each with one folder per class, whose sorted names are in the
order of the classes. Packages: those of benchmarks/lite0.py, and `pip install --no-deps torch-pruning==1.6.1`.

Rows, for every share of the MACs:

- recoup best: the default, end to end by the command line, `recoup prune benchmarks/lite0.py:build --macs SHARE ...`;
  with `--api` by `recoup.prune` with the same method, for machines without click.
- uniform widths, one pass: the same with `--method paper`: the same share of every group, and the paper's compensation.
- L2: recoup's groups and surgery, channels by the L2 norm of their filters, nothing refitted.
- Torch-Pruning: MagnitudePruner with MagnitudeImportance(p=2). Its one pruning ratio is found by bisection; the
  classifier is ignored, since its outputs are the classes. The network's own modules (convolutions with static padding,
  ReLU6) are plain enough for it: nothing was replaced.
- both of these again after the batch norms have been estimated on the calibration images.

Top-1 is of the validation images, which nothing else has seen. Seconds are those of making the smaller network,
measuring it not counted; by the command line they hold the start-up of `torch.export`, which the other rows share.
MACs are counted by recoup, on the network as it was made.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from benchmarks.baselines import prune_by_l2, prune_with_torch_pruning, reestimated
from benchmarks.lite0 import INPUT, build
from benchmarks.machine import device_name
from recoup.cli.data import open_data

SHARES = (0.8, 0.7, 0.6)
# Methods of recoup, by the names that their rows have.
RECOUP = {"best": "recoup best", "fast": "recoup fast", "paper": "uniform widths, one pass"}
METHODS = (*RECOUP, "L2", "Torch-Pruning")
DEFAULT = tuple(method for method in METHODS if method != "fast")
CLASSIFIER = "network._fc"
COMMAND = (sys.executable, "-c", "from recoup.cli import main; main()")
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """One smaller network: the share of MACs asked for and reached, top-1 in percent, and seconds to make it."""

    method: str
    share: float
    macs: float
    top1: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Smaller:
    """A network and the seconds it took to make it."""

    model: nn.Module
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """The original, its MACs, and the images, on the device."""

    model: nn.Module
    macs: int
    calibration: Batches
    validation: Batches

    @property
    def example(self) -> Tensor:
        """One image."""
        return self.calibration[0][0][:1]


def main() -> None:
    options = parse()
    bench = open_bench(options)
    content: dict[str, Any] = {
        "device": device_name(options.device),
        "calibration": sum(len(labels) for _, labels in bench.calibration),
        "validation": sum(len(labels) for _, labels in bench.validation),
        "base": recoup.accuracy(bench.model, bench.validation),
        "rows": [],
    }
    for row in rows(bench, options):
        content["rows"].append(dataclasses.asdict(row))
        print(row, file=sys.stderr, flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(content, indent=1) + "\n")
    print(table(content))


def rows(bench: Bench, options: argparse.Namespace) -> Iterator[Row]:
    """Every method at every share, one by one as they are done."""
    for share in options.shares:
        for method in options.methods:
            if method in RECOUP:
                report = by_api(bench, share, method) if options.api else by_command(share, method, options)
                yield row_of(report, share, method)
            else:
                yield from rows_of_rival(bench, method, share)


def by_command(share: float, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """The report that `recoup prune ... --json` prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, *arguments(share, method, options), "-o", str(Path(folder) / "smaller")]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)["report"]
    return report


def arguments(share: float, method: str, options: argparse.Namespace) -> list[str]:
    """What follows `recoup` on the command line, up to the folder for the result."""
    said = {
        "--calibration": f"folder:{Path(options.images) / 'calibration'}",
        "--validation": f"folder:{Path(options.images) / 'validation'}",
        "--macs": share,
        "--input": ",".join(map(str, INPUT.shape)),
        "--normalise": "none",
        "--calibration-images": options.samples,
        "--validation-images": options.validation_images,
        "--batch-size": options.batch,
        "--method": method,
        "--device": options.device,
    }
    words = [str(word) for name, value in said.items() if value is not None for word in (name, value)]
    return ["prune", f"{Path(__file__).with_name('lite0.py')}:build", *words, "--json"]


def by_api(bench: Bench, share: float, method: str) -> dict[str, Any]:
    """The report of `recoup.prune` with the method that the command line would use."""
    budget = recoup.Budget(macs=share)
    result = recoup.prune(bench.model, bench.calibration, validation=bench.validation, budget=budget, method=method)
    return result.report.to_json()


def row_of(report: dict[str, Any], share: float, method: str) -> Row:
    """What a report says of the smaller network."""
    seconds = sum(value for stage, value in report["seconds"].items() if stage != "measure")
    return Row(RECOUP[method], share, 1 - report["macs_removed"], report["score"]["after"], seconds)


def rows_of_rival(bench: Bench, method: str, share: float) -> Iterator[Row]:
    """A method as it is, and with the batch norms estimated again."""
    plain = timed(lambda: prune_by(method, bench, share))
    yield measured(bench, method, share, plain)
    again = timed(lambda: reestimated(plain.model, bench.calibration))
    yield measured(bench, f"{method} + batch norm", share, Smaller(again.model, plain.seconds + again.seconds))


def prune_by(method: str, bench: Bench, share: float) -> nn.Module:
    if method == "L2":
        return prune_by_l2(bench.model, bench.example, share)
    return prune_with_torch_pruning(bench.model, bench.example, share, ignored=CLASSIFIER)


def measured(bench: Bench, method: str, share: float, smaller: Smaller) -> Row:
    macs = recoup.inspect(smaller.model, bench.example).cost.macs
    top1 = recoup.accuracy(smaller.model, bench.validation)
    return Row(method, share, macs / bench.macs, top1, smaller.seconds)


def timed(make: Callable[[], nn.Module]) -> Smaller:
    start = time.perf_counter()
    model = make()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Smaller(model, time.perf_counter() - start)


def table(content: dict[str, Any]) -> str:
    """The rows as Markdown, by share."""
    lines = [
        f"| MACs kept | method | reached | top-1 (original: {content['base']:.2f}) | points lost | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(content["rows"], key=lambda row: -row["share"]):
        lost = content["base"] - row["top1"]
        lines.append(
            f"| {row['share']:.0%} | {row['method']} | {row['macs']:.1%} | {row['top1']:.2f} | {lost:.2f} | "
            f"{row['seconds']:.1f} |"
        )
    return "\n".join(lines)


def open_bench(options: argparse.Namespace) -> Bench:
    model = build().to(options.device)
    calibration = resident(options, "calibration", options.samples)
    validation = resident(options, "validation", options.validation_images)
    return Bench(model, recoup.inspect(model, calibration[0][0][:1]).cost.macs, calibration, validation)


def resident(options: argparse.Namespace, part: str, limit: int | None) -> Batches:
    """Images as batches that stay on the device: the same, in the same order, as the command line reads."""
    data = open_data(f"folder:{Path(options.images) / part}", INPUT, batch_size=options.batch, limit=limit)
    return [(images.to(options.device), labels.to(options.device)) for images, labels in data]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    images = os.environ.get("RECOUP_IMAGENET")
    parser.add_argument("--images", default=images, required=images is None, help="or RECOUP_IMAGENET")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the MACs to keep")
    parser.add_argument("--methods", nargs="+", default=DEFAULT, choices=METHODS)
    parser.add_argument("--api", action="store_true", help="recoup.prune instead of the command line")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--samples", type=int, help="calibration images, all if not said")
    parser.add_argument("--validation-images", type=int, help="all if not said")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
