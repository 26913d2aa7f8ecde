"""Trained networks and the images they are pruned with and measured on, on the device.

CIFAR-10: calibration images are drawn from 40,000 training images, the 10,000 others are for validation, test images
are only measured. EfficientNet-Lite0: the folders `calibration` and `validation` that benchmarks/efficientnet.py takes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

import recoup
from benchmarks import lite0
from benchmarks.machine import device_name, timed
from benchmarks.rows import Case, Outcome, Row, Store
from recoup.channels.cost import cost
from recoup.cli.data import open_data
from recoup.cli.input_spec import InputSpec
from recoup.cli.models import open_model

Batches = list[tuple[Tensor, Tensor]]
# Calibration images of CIFAR-10, and images per batch by the side of an image.
CIFAR_IMAGES = 20_000
BATCH = {32: 1000, 224: 100}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The name by which recoup builds a network, and the file with its weights."""

    model: str
    file: str


CIFAR = {
    "vgg16": Checkpoint("recoup:vgg16_bn", "vgg16_bn_cifar10.fp16.safetensors"),
    "resnet56": Checkpoint("recoup:resnet56", "resnet56-4bfd9763.th"),
    "resnet20": Checkpoint("recoup:resnet20", "resnet20-12fca82f.th"),
}
LITE0 = "lite0"


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A network, its calibration images by seed, and its accuracy on the splits it is measured on.

    `splits` are "validation" and, where there is one, "test", whose images nothing but measuring looks at.
    """

    network: str
    model: nn.Module
    calibration: Callable[[int], Batches]
    splits: Mapping[str, Batches]
    base: Mapping[str, float]
    device: str

    @property
    def example(self) -> Tensor:
        """One image."""
        images, _ = self.splits["validation"][0]
        return images[:1]

    @property
    def classifier(self) -> str:
        """The name of the last linear layer, whose outputs are the classes."""
        names: list[str] = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        return names[-1]

    def outcome(self, smaller: nn.Module, removed: float, stages: Mapping[str, float]) -> Outcome:
        """What is lost in a smaller network that took so many seconds to make."""
        top1 = {name: recoup.accuracy(smaller, batches) for name, batches in self.splits.items()}
        drops = {name: self.base[name] - value for name, value in top1.items()}
        divergences = {name: recoup.divergence(smaller, self.model, batches) for name, batches in self.splits.items()}
        last = list(self.splits)[-1]
        return Outcome(
            removed=removed,
            top1=top1[last],
            validation_drop=drops["validation"],
            test_drop=drops.get("test"),
            kl=divergences[last],
            validation_kl=divergences["validation"],
            seconds=sum(stages.values()),
            stages=dict(stages),
            device=self.device,
        )

    def outcome_of(
        self, seen: recoup.Calibration, keep: Tensor, recovered: recoup.Recovered, seconds: Mapping[str, float]
    ) -> Outcome:
        """What is lost with a plan; `seconds` are those of all the steps up to it."""
        stages = dict(seconds)
        smaller = timed(stages, "apply", lambda: verified(seen, recovered.plan))
        return replace(self.outcome(smaller, removed(seen, keep), stages), output_error=recovered.error)


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """The steps that all shares of the MACs have in common, done on one calibration sample, and their seconds."""

    seen: recoup.Calibration
    method: recoup.Best
    rankings: Mapping[str, recoup.Ranking]
    seconds: Mapping[str, float]


def ranked(model: nn.Module, batches: Batches, method: recoup.Best) -> Ranked:
    """Trace, split, calibrate and rank."""
    seconds: dict[str, float] = {}
    traced = timed(seconds, "trace", lambda: recoup.trace(model, batches[0]))
    data = timed(seconds, "split", lambda: recoup.split(model, batches))
    seen = timed(seconds, "calibrate", lambda: recoup.calibrate(traced, data, method))
    return Ranked(seen, method, timed(seconds, "rank", lambda: recoup.rank(seen)), seconds)


def verified(seen: recoup.Calibration, plan: recoup.Plan) -> nn.Module:
    """The smaller network of a plan, proven to compute what it should."""
    smaller = recoup.apply(seen.model, plan)
    recoup.verify(seen.model, plan, smaller, seen.traced.inputs)
    return smaller


def removed(seen: recoup.Calibration, keep: Tensor) -> float:
    """The share of the MACs that a mask removes."""
    whole, left = (cost(seen.structure, seen.model, mask).macs for mask in (None, keep))
    return 1 - left / whole


def open_bench(network: str, options: argparse.Namespace) -> Bench:
    """A network by its name here, with its images; torch.export and the device have been started."""
    bench = _lite0(options) if network == LITE0 else _cifar(network, options)
    recoup.trace(bench.model, bench.example)
    return bench


def measure_all(
    store: Store,
    options: argparse.Namespace,
    cases: Callable[[str, argparse.Namespace], list[Case]],
    rows: Callable[[Bench, int, list[Case], argparse.Namespace], Iterable[Row]],
) -> None:
    """Put the rows of all cases that have none yet into the store: by network, then by calibration sample."""
    for network in options.networks:
        waiting = store.waiting(cases(network, options))
        if not waiting:
            continue
        bench = open_bench(network, options)
        for seed in sorted({case.seed for case in waiting}):
            for row in rows(bench, seed, [case for case in waiting if case.seed == seed], options):
                store.add(row)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where networks and images are, and how many images to take."""
    parser.add_argument("--cifar", default=os.environ.get("RECOUP_CIFAR10"), help="folder with cifar-10-batches-py")
    parser.add_argument("--checkpoints", help="folder with the weights of the networks for CIFAR-10")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help=f"images per batch; by the side of an image {BATCH} if not said")
    parser.add_argument("--validation-images", type=int, help="all if not said")
    parser.add_argument("--test-images", type=int, help="all if not said")


def check_places(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse networks whose weights or images nobody has told where to find."""
    needed = {"cifar", "checkpoints"} if set(options.networks) - {LITE0} else set()
    needed |= {"imagenet"} if LITE0 in options.networks else set()
    missing = [f"--{name}" for name in sorted(needed) if getattr(options, name) is None]
    if missing:
        parser.error(f"{', '.join(missing)} must be said for {', '.join(options.networks)}")


def _cifar(network: str, options: argparse.Namespace) -> Bench:
    checkpoint = CIFAR[network]
    opened = open_model(checkpoint.model, Path(options.checkpoints) / checkpoint.file)

    def read(split: str, limit: int | None, seed: int = 0) -> Batches:
        return resident(f"cifar10:{options.cifar}@{split}", opened.input, options, limit, seed)

    splits = {
        "validation": read("validation", options.validation_images),
        "test": read("test", options.test_images),
    }
    images = options.images or CIFAR_IMAGES
    return _bench(network, opened.model, lambda seed: read("calibration", images, seed), splits, options)


def _lite0(options: argparse.Namespace) -> Bench:
    def read(part: str, limit: int | None, seed: int = 0) -> Batches:
        return resident(f"folder:{Path(options.imagenet) / part}", lite0.INPUT, options, limit, seed)

    splits = {"validation": read("validation", options.validation_images)}
    return _bench(LITE0, lite0.build(), lambda seed: read("calibration", options.images, seed), splits, options)


def _bench(
    network: str,
    model: nn.Module,
    calibration: Callable[[int], Batches],
    splits: Mapping[str, Batches],
    options: argparse.Namespace,
) -> Bench:
    model = model.to(options.device)
    base = {name: recoup.accuracy(model, batches) for name, batches in splits.items()}
    return Bench(network, model, calibration, splits, base, device_name(options.device))


def resident(data: str, spec: InputSpec, options: argparse.Namespace, limit: int | None, seed: int) -> Batches:
    """Images as batches that stay on the device."""
    batches = open_data(data, spec, batch_size=options.batch or BATCH[spec.shape[-1]], limit=limit, seed=seed)
    return [(images.to(options.device), labels.to(options.device)) for images, labels in batches]
