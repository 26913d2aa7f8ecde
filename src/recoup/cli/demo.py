"""`recoup demo`: the whole method on handwritten digits, in less than two minutes and without a download.

A small network is trained and pruned. Which channels go is decided on `digits@validation`; `digits@test` is looked at
once, at the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from recoup._prune import Result, prune
from recoup.artefact.files import PAGE
from recoup.artefact.writing import require_new
from recoup.cli.data import Data, open_data
from recoup.cli.display import note, print_costs, print_json, print_widths, shown_progress
from recoup.cli.failure import reports_failures
from recoup.cli.input_spec import unnormalised
from recoup.cli.models import train_digits
from recoup.cli.models.digits import demo_network
from recoup.cli.network import find_device
from recoup.cli.options import common_options, folder_option
from recoup.judge.accuracy import accuracy
from recoup.methods.best import Fast
from recoup.progress import Progress, silent
from recoup.report.content import Report

MODEL = "recoup:demo"
"""What the demo prunes; the saved result names it as its source."""

INPUT = unnormalised((1, 8, 8))
"""One grey image of 8 by 8 pixels in [0, 1]."""

FOLDER = "recoup-demo"
"""Where the result goes unless a folder is named."""

EPOCHS = 12
TOLERANCE = 1.0


GO_ON = """
With a network of your own:
  recoup inspect my_file.py:build --input 3,32,32
  recoup prune my_file.py:build --weights trained.pt --input 3,32,32 --calibration folder:images \\
      --validation folder:labelled --tolerance 1.0 -o smaller

In Python:
  import recoup
  result = recoup.prune(model, calibration_batches, validation=labelled_batches, tolerance=1.0)
  result.save("smaller")"""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Where the result lies, its report, accuracy on `digits@test` before and after, and the seconds it all took."""

    folder: Path
    report: Report
    before: float
    after: float
    seconds: float

    @property
    def drop(self) -> float:
        """Points lost on the test images."""
        return self.before - self.after

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        test = {"data": "digits@test", "before": self.before, "after": self.after, "drop": self.drop}
        return {
            "folder": str(self.folder),
            "model": MODEL,
            "test": test,
            "seconds": self.seconds,
            "report": self.report.to_json(),
        }


def run_demo(
    folder: str | Path, progress: Progress = silent, *, device: str | torch.device = "cpu", seed: int = 0
) -> DemoResult:
    """Train, prune within a point of accuracy, measure on held-out images and save into the new `folder`."""
    start = time.perf_counter()
    require_new(folder)
    with _one_thread():
        trained = _train(torch.device(device), seed, progress)
        result = _prune(trained, seed, progress)
        test = open_data("digits@test", INPUT)
        before, after = accuracy(trained, test), accuracy(result.model, test)
    saved = result.save(folder, source=MODEL)
    return DemoResult(saved, result.report, before, after, time.perf_counter() - start)


def free_folder(name: str = FOLDER) -> Path:
    """The folder `name`, or the first of `name-2`, `name-3`, ... that does not exist."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path, names) if not path.exists())


@contextmanager
def _one_thread() -> Iterator[None]:
    """The network is so small that threads would spend their time waiting for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(device: torch.device, seed: int, progress: Progress) -> nn.Module:
    images, labels = _tensors(open_data("digits@train", INPUT))
    return train_digits(
        demo_network().to(device),
        images.to(device),
        labels.to(device),
        epochs=EPOCHS,
        seed=seed,
        progress=lambda epoch, _: progress("train", epoch, EPOCHS),
    )


def _tensors(data: Data) -> tuple[Tensor, Tensor]:
    pairs = [batch for batch in data if isinstance(batch, tuple)]
    return torch.cat([images for images, _ in pairs]), torch.cat([labels for _, labels in pairs])


def _prune(trained: nn.Module, seed: int, progress: Progress) -> Result:
    return prune(
        trained,
        open_data("digits@train", INPUT),
        validation=open_data("digits@validation", INPUT),
        tolerance=TOLERANCE,
        method=Fast(seed=seed),
        progress=progress,
    )


@click.command("demo")
@folder_option(required=False, help=f"New folder for the result. [default: {FOLDER}, or {FOLDER}-2, ...]")
@common_options
@reports_failures
def demo_command(output: Path | None, device: str, seed: int, as_json: bool) -> None:
    """Train a small network on handwritten digits, prune it and measure both on held-out images."""
    place = find_device(device)
    with shown_progress() as progress:
        result = run_demo(output or free_folder(), progress, device=place, seed=seed)
    if as_json:
        print_json(result.to_json())
        return
    _print(result)
    note(GO_ON)


def _print(result: DemoResult) -> None:
    print_costs(result.report, {"Accuracy on held-out digits": (result.before, result.after)})
    print_widths(result.report)
    click.echo(f"{result.seconds:.0f} seconds. Report: {result.folder / PAGE}")
    shape = ",".join(map(str, INPUT.shape))
    note(f"Measure it again: recoup evaluate {result.folder} --data digits@test --input {shape}")
