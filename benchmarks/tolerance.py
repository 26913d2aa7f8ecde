"""Whether a tolerance holds on images that nothing has looked at, over many draws of the images.

    python -m benchmarks.train resnet20 --data cifar10:DIR --out CHECKPOINTS/resnet20_cifar10_40k.safetensors
    python -m benchmarks.tolerance --cifar DIR --checkpoints CHECKPOINTS --device cuda --jobs 3

For each seed other calibration images are drawn from 40,000 training images, and other labelled images to measure the
tolerance on; `recoup.prune(..., tolerance=T)` does the rest as it comes, with its confidence of 95 %. Then the drop is
measured on untouched images.

- vgg16: it was trained on all 50,000 training images, so labelled images are test images. The seed divides them: one
  part to measure the tolerance on, the other untouched.
- resnet20: trained by benchmarks/train.py on 40,000 training images. The tolerance is measured on images drawn
  from the 10,000 others; the test images are untouched.

The rule: a seed exceeds the tolerance if the drop on its untouched images is above it. That drop is a measurement as
well. Its noise, the standard error of the mean of differences between two networks on the same images, stands beside
it, and the last column counts the seeds that exceed the tolerance by more than 1.64 times that, which noise alone
would do once in twenty times.

Rows are kept in `--out` as they come, and a second call goes on where the first stopped. With `--jobs`, several
processes share the device; seconds are then those of a shared device.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import recoup
from benchmarks.best import mean_and_worst, title
from benchmarks.machine import device_name, timed
from benchmarks.networks import CIFAR, Checkpoint
from benchmarks.rows import Case, Outcome, Plain, Row, Store, alike, mean
from recoup.cli.data.batches import Pixels, RowBatches, draw
from recoup.cli.data.cifar import open_cifar
from recoup.cli.data.spec import parse_spec
from recoup.cli.models import OpenModel, open_model
from recoup.errors import UsageError
from recoup.judge.accuracy import read_answers

Batches = list[tuple[Tensor, Tensor]]
METHOD = "best"
OUT = Path(__file__).parent / "results" / "untouched.json"
BATCH = 1000
# What noise alone exceeds once in twenty times.
FAR = 1.64


@dataclass(frozen=True, slots=True)
class Subject:
    """A network, and the split of its labelled images; the test images are untouched, or what is left of them."""

    checkpoint: Checkpoint
    labelled: str


SUBJECTS = {
    "vgg16": Subject(CIFAR["vgg16"], "test"),
    "resnet20": Subject(Checkpoint("recoup:resnet20", "resnet20_cifar10_40k.safetensors"), "validation"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """What one seed has drawn: to calibrate on, to measure the tolerance on, and what neither has seen."""

    calibration: Batches
    validation: Batches
    untouched: Batches


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """Points: what the original scores on some images, what the smaller network has lost, and the noise of that."""

    before: float
    drop: float
    noise: float


def main() -> None:
    options = parse()
    names = ("images", "validation_images", "untouched_images")
    store = Store(options.out, {name: getattr(options, name) for name in names})
    cases = [
        Case(network, METHOD, seed, tolerance=options.tolerance)
        for network in options.networks
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    for row in measured(store.waiting(cases), options):
        store.add(row)
    print(table(store.rows))


def measured(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the cases as they are done, by as many processes as asked for."""
    if options.jobs == 1:
        yield from (row_of(case, options) for case in cases)
        return
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    spawning = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(options.jobs, spawning, torch.set_num_threads, (threads,)) as pool:
        waiting = [pool.submit(row_of, case, options) for case in cases]
        yield from (done.result() for done in as_completed(waiting))


def row_of(case: Case, options: argparse.Namespace) -> Row:
    """The row of one case."""
    opened = _open(case.network, options.checkpoints, options.device)
    return Row(case, outcome(opened.model, images_of(case, opened, options), case))


def outcome(model: nn.Module, images: Images, case: Case) -> Outcome:
    """What the default removes within the tolerance, and what that loses on untouched images."""
    stages: dict[str, float] = {}
    assert case.tolerance is not None
    result: recoup.Result = timed(
        stages,
        "prune",
        lambda: recoup.prune(
            model,
            images.calibration,
            validation=images.validation,
            tolerance=case.tolerance,
            method=recoup.Best(seed=case.seed),
        ),
    )
    score, lost = result.report.score, lost_on(images.untouched, model, result.model)
    assert score is not None
    return Outcome(
        removed=result.report.macs_removed,
        top1=lost.before - lost.drop,
        validation_drop=score.drop,
        test_drop=lost.drop,
        noise=lost.noise,
        bound=score.bound,
        seconds=sum(stages.values()),
        stages=stages,
        device=device_name(next(model.parameters()).device.type),
    )


def lost_on(batches: Batches, model: nn.Module, smaller: nn.Module) -> Lost:
    """What a smaller network loses on labelled images, by pairs of answers."""
    labels = torch.cat([labels for _, labels in batches])
    before, after = ((read_answers(m, batches).answers.cpu() == labels.cpu()).double() for m in (model, smaller))
    lost = before - after
    return Lost(100 * float(before.mean()), 100 * float(lost.mean()), 100 * float(lost.std()) / len(lost) ** 0.5)


def images_of(case: Case, opened: OpenModel, options: argparse.Namespace) -> Images:
    """The images of one seed, on the device."""

    def source(split: str) -> Pixels:
        return _source(options.cifar, split, opened)

    split, count = SUBJECTS[case.network].labelled, options.validation_images
    labelled = source(split)
    if count >= labelled.count:
        raise UsageError(f"{count} validation images leave none of the {labelled.count}. Ask for fewer.")
    shuffled = torch.randperm(labelled.count, generator=torch.Generator().manual_seed(case.seed))
    test = source("test")
    untouched = shuffled[count:] if split == "test" else torch.arange(test.count)
    calibration = draw(source("calibration"), batch_size=BATCH, limit=options.images, seed=case.seed)
    return Images(
        _resident(calibration, options.device),
        _resident(RowBatches(labelled, shuffled[:count], BATCH), options.device),
        _resident(RowBatches(test, untouched[: options.untouched_images], BATCH), options.device),
    )


@functools.cache
def _open(network: str, checkpoints: str, device: str) -> OpenModel:
    """A network on the device; torch.export has been started."""
    checkpoint = SUBJECTS[network].checkpoint
    opened = open_model(checkpoint.model, Path(checkpoints) / checkpoint.file)
    opened.model.to(device)
    recoup.trace(opened.model, torch.zeros(1, *opened.input.shape, device=device))
    return opened


@functools.cache
def _source(cifar: str, split: str, opened: OpenModel) -> Pixels:
    return open_cifar(parse_spec(f"cifar10:{cifar}@{split}"), opened.input)


def _resident(batches: RowBatches, device: str) -> Batches:
    found = []
    for batch in batches:
        assert isinstance(batch, tuple)
        found.append((batch[0].to(device), batch[1].to(device)))
    return found


def table(found: Sequence[Plain]) -> str:
    """Averages over seeds, as Markdown, and how many of them exceed the tolerance."""
    lines = [
        "| network (top-1) | tolerance | seeds | MACs removed (least to most) | validation drop (worst) | "
        "bound (worst) | untouched drop (worst) | its noise | above the tolerance | by more than noise | seconds |",
        "|---" * 11 + "|",
    ]
    return "\n".join([*lines, *(line(mine) for mine in alike(found, "network", "tolerance"))])


def line(mine: Sequence[Plain]) -> str:
    removed, tolerance = [row["removed"] for row in mine], mine[0]["tolerance"]
    drops = [mean_and_worst(mine, name) for name in ("validation_drop", "bound", "test_drop")]
    above = sum(row["test_drop"] > tolerance for row in mine)
    far = sum(row["test_drop"] > tolerance + FAR * row["noise"] for row in mine)
    return (
        f"| {title(mine)} | {tolerance} | {len(mine)} | "
        f"{mean(mine, 'removed', '.1%')} ({min(removed):.1%} to {max(removed):.1%}) | {' | '.join(drops)} | "
        f"{mean(mine, 'noise')} | {above} | {far} | {mean(mine, 'seconds', '.1f')} |"
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", default=os.environ.get("RECOUP_CIFAR10"), help="folder with cifar-10-batches-py")
    parser.add_argument("--checkpoints", required=True, help="folder with the weights of the networks")
    parser.add_argument("--networks", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tolerance", type=float, default=1.0, help="in points")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=4000, help="for calibration")
    parser.add_argument("--validation-images", type=int, default=5000, help="to measure the tolerance on")
    parser.add_argument("--untouched-images", type=int, help="all that are left if not said")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(words)
    if options.cifar is None:
        parser.error("--cifar must be said")
    return options


if __name__ == "__main__":
    main()
