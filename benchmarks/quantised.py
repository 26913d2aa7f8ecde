"""Prune, then quantise: accuracy and time of a network and of its half, each in float32 and in int8.

    python -m benchmarks.quantised --cifar DIR --checkpoints DIR --out benchmarks/results/quantised.json --docs docs
    python -m benchmarks.quantised --networks lite0 --imagenet DIR --out FILE        # EfficientNet-Lite0

Networks run in onnxruntime. int8 is its static quantisation: weights per channel, activations with ranges seen on
calibration images, in QDQ form. Times are medians of interleaved runs on two threads, relative to the original.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization import shape_inference
from torch import Tensor, nn

import recoup
from benchmarks.machine import versions
from benchmarks.networks import CIFAR, LITE0, Batches, Bench, add_arguments, check_places, open_bench
from benchmarks.pages import publish
from benchmarks.rows import Plain, Store

FORMS = ("original", "original, int8", "half", "half, int8")
ROUNDS, THREADS = 30, 2
BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """A network by its name, in one of the four forms."""

    network: str
    form: str


@dataclass(frozen=True, slots=True)
class Row:
    """Top-1 in percent, the size of the file, and the time of a batch relative to the original's, by batch size."""

    case: Case
    method: str
    images: int
    top1: float
    bytes: int
    times: Mapping[str, float]

    def plain(self) -> Plain:
        """For the file."""
        return {**asdict(self.case), **{name: value for name, value in asdict(self).items() if name != "case"}}


def main() -> None:
    options = parse()
    store = Store(options.out, versions(), lambda row: Case(row["network"], row["form"]))
    for network in options.networks:
        if store.waiting(Case(network, form) for form in FORMS):
            for row in rows(open_bench(network, options), options):
                store.add(row)
    publish(table(store.rows), "quantised", None if options.docs is None else options.docs / "more-results.md")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--imagenet", default=os.environ.get("RECOUP_IMAGENET"), help="its calibration and validation")
    parser.add_argument("--networks", nargs="+", choices=(*CIFAR, LITE0), default=["vgg16"])
    parser.add_argument("--method", choices=("best", "fast"), default="best")
    parser.add_argument("--images", type=int, default=1000, help="calibration images; 200 of them give the ranges")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path, help="folder whose more-results.md gets the table")
    options = parser.parse_args()
    check_places(parser, options)
    return options


def rows(bench: Bench, options: argparse.Namespace) -> Iterator[Row]:
    """One for each form of a network."""
    calibration = bench.calibration(0)
    smaller = recoup.prune(bench.model, calibration, budget=recoup.Budget(macs=0.5), method=options.method).model
    with tempfile.TemporaryDirectory() as folder:
        files = written({"original": bench.model, "half": smaller}, calibration, Path(folder))
        sessions = {form: session(file) for form, file in files.items()}
        times = {size: relative_times(sessions, bench.example.expand(size, -1, -1, -1)) for size in BATCHES}
        measured = bench.splits["test" if "test" in bench.splits else "validation"]
        for form in FORMS:
            mine = {str(size): times[size][form] for size in BATCHES}
            top1, size = accuracy(sessions[form], measured), files[form].stat().st_size
            yield Row(Case(bench.network, form), options.method, options.images, top1, size, mine)


def written(models: Mapping[str, nn.Module], calibration: Batches, folder: Path) -> dict[str, Path]:
    """Every model as a file of onnxruntime, and as an int8 one."""
    files: dict[str, Path] = {}
    for name, model in models.items():
        plain, ready, small = (folder / f"{name}{end}.onnx" for end in ("", "-ready", "-int8"))
        example = calibration[0][0][:2]
        samples = torch.export.Dim("samples")
        torch.onnx.export(
            model, (example,), str(plain), dynamo=True, dynamic_shapes=({0: samples},), external_data=False,
            verbose=False,
        )  # fmt: skip
        shape_inference.quant_pre_process(str(plain), str(ready))
        quantization.quantize_static(str(ready), str(small), Images(str(ready), calibration), per_channel=True)
        files |= {name: plain, f"{name}, int8": small}
    return files


class Images(quantization.CalibrationDataReader):  # type: ignore[misc]  # the library has no types
    """Calibration images one batch after the other, in the form that the quantiser asks for."""

    def __init__(self, file: str, calibration: Batches, count: int = 200) -> None:
        self._name = onnxruntime.InferenceSession(file).get_inputs()[0].name
        self._batches = iter(torch.cat([images for images, _ in calibration])[:count].split(50))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch.numpy()}


def session(file: Path) -> Callable[[Tensor], Any]:
    """A function from images to class scores that runs a file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    opened = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name = opened.get_inputs()[0].name
    return lambda images: opened.run(None, {name: images.numpy()})[0]


def relative_times(sessions: Mapping[str, Callable[[Tensor], Any]], images: Tensor) -> dict[str, float]:
    """The median time of every session on a batch, relative to the original's; they take turns."""
    images = images.contiguous()
    seconds: dict[str, list[float]] = {form: [] for form in sessions}
    for _ in range(ROUNDS):
        for form, run in sessions.items():
            start = time.perf_counter()
            run(images)
            seconds[form].append(time.perf_counter() - start)
    usual = {form: statistics.median(values) for form, values in seconds.items()}
    return {form: value / usual["original"] for form, value in usual.items()}


def accuracy(run: Callable[[Tensor], Any], batches: Batches) -> float:
    """Top-1 in percent."""
    right = sum(int((run(images).argmax(axis=1) == labels.numpy()).sum()) for images, labels in batches)
    return 100 * right / sum(len(labels) for _, labels in batches)


def table(found: Sequence[Plain]) -> str:
    """A line for every network and form, with what the rows were made by in the heading."""
    made = ", ".join(sorted({f"{row['method']}, {row['images']:,} images" for row in found}))
    heads = [f"time of a batch of {size}" for size in BATCHES]
    lines = [f"| network ({made}) | form | top-1 | MB | {' | '.join(heads)} |", "|---" * (4 + len(heads)) + "|"]
    for row in sorted(found, key=lambda row: (row["network"], FORMS.index(row["form"]))):
        times = [f"{row['times'][str(size)]:.2f}" for size in BATCHES]
        cells = [row["network"], row["form"], f"{row['top1']:.2f}", f"{row['bytes'] / 1e6:.1f}", *times]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
