"""The demo: train a small network on handwritten digits, prune it, and measure both on digits neither has met.

Nothing is downloaded. Which channels go is decided on `digits@validation`; `digits@test` is looked at once, at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.artefact import require_new
from recoup.data import Data, open_data
from recoup.evaluate import accuracy
from recoup.inputs import unnormalised
from recoup.models import digits_resnet, train_digits
from recoup.progress import Progress, silent
from recoup.prune import Result, prune
from recoup.report.content import Report
from recoup.settings import find_preset

MODEL = "recoup.demo:network"
"""What the demo prunes; the saved result names it as its source."""

INPUT = unnormalised((1, 8, 8))
"""One grey image of 8 by 8 pixels in [0, 1]."""

FOLDER = "recoup-demo"
"""Where the result goes unless a folder is named."""

WIDTH = 48
EPOCHS = 12
TOLERANCE = 1.0


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


def network() -> nn.Module:
    """The network that the demo trains and prunes, with fresh weights."""
    return digits_resnet(width=WIDTH)


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
        network().to(device),
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
        preset=dataclasses.replace(find_preset("fast"), seed=seed),
        progress=progress,
    )
