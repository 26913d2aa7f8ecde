"""VGG-16 on CIFAR-10 with the paper's protocol: five tolerances, several calibration samples, one table.

    python -m benchmarks.paper --cifar DIR --weights vgg16_bn_cifar10.fp16.safetensors --device cuda

Calibration: a random sample of the 40,000 training images; validation: the 10,000 others; test: reported only.
Statistics and rankings are made once per sample and shared by the tolerances.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.channels.cost import cost
from recoup.cli.data import open_data
from recoup.cli.models import open_model
from recoup.judge.acceptance import ImageAcceptance
from recoup.methods.registry import EVEN_ODDS

Method = recoup.Paper | recoup.Released
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Published:
    """What the paper reports for a tolerance: FLOPs removed, in percent, and points lost on the test images."""

    tolerance: float
    removed: float
    test_drop: float


# arXiv 2108.13728, VGG-16 on CIFAR-10. The tolerance is what may be lost on validation images, not what was lost.
PUBLISHED = (
    Published(0.5, 43.23, 0.45),
    Published(1.0, 50.90, 0.80),
    Published(1.5, 56.77, 1.30),
    Published(2.0, 59.72, 1.72),
    Published(2.5, 65.61, 2.09),
)
# 0.20 GPU hours for one tolerance.
PUBLISHED_SECONDS = 720
PUBLISHED_WITH = "its authors' GPU, 40,000 images"
TOLERANCES = tuple(published.tolerance for published in PUBLISHED)
METHODS: dict[str, type[Method]] = {"paper": recoup.Paper, "released": recoup.Released}
FIELDS = ("ridge", "weighting", "order", "constraint", "selector", "positions")
SEARCH = "paper's search (our run)"
# The stages that are timed for one tolerance; the first trace of a process is mostly the start-up of torch.export.
STAGES = ("calibrate", "select", "search", "finish")
# What rows were made with that do not say so.
DEVICE, IMAGES = "NVIDIA H200", 20_000
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = parse()
    opened = open_model(options.model, options.weights)
    model = opened.model.to(options.device)
    splits = {name: resident(options, opened.input, name) for name in ("validation", "test")}
    rows: list[dict[str, Any]] = []
    made_with = {"device": device_name(options.device), "images": options.images}
    for seed in range(options.seeds):
        batches = resident(options, opened.input, "calibration", limit=options.images, seed=seed)
        method = method_of(options, seed)
        found = one_sample(model, batches, splits, method, options.tolerances, keep_class=options.keep_class)
        rows += [{**row, **made_with} for row in found]
    print(json.dumps({"device": device_name(options.device), "method": options.method, "rows": rows}))
    print(table(rows, PUBLISHED if options.model == "recoup:vgg16_bn" else ()))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))


def one_sample(
    model: nn.Module,
    batches: Batches,
    splits: dict[str, Batches],
    method: Method,
    tolerances: Iterable[float],
    *,
    keep_class: bool,
) -> list[dict[str, Any]]:
    """Rows for every tolerance at one calibration sample."""
    seconds: dict[str, float] = {}
    traced = timed(seconds, "trace", lambda: recoup.trace(model, batches[0], keep_class=keep_class))
    data = recoup.split(model, batches, held_out=method.holds_out)
    seen = timed(seconds, "calibrate", lambda: recoup.calibrate(traced, data, method))
    rankings = timed(seconds, "select", lambda: recoup.rank(seen))
    acceptance = ImageAcceptance(model, splits["validation"], EVEN_ODDS)
    test_base = recoup.accuracy(model, splits["test"])
    before = cost(seen.structure, model).macs
    rows = []
    for tolerance in tolerances:
        own, goal = dict(seconds), recoup.Goal(tolerance=tolerance, validation=splits["validation"])
        found = timed(own, "search", lambda g=goal: recoup.allocate(seen, rankings, g, acceptance))
        smaller, proof = timed(own, "finish", lambda f=found: finished(seen, f))
        rows.append(
            {
                "seed": method.seed,
                "tolerance": tolerance,
                "macs_drop": 100 * (1 - cost(seen.structure, model, found.keep).macs / before),
                "validation_drop": acceptance(smaller).drop,
                "test_drop": test_base - recoup.accuracy(smaller, splits["test"]),
                "kl": recoup.divergence(smaller, model, splits["test"]),
                "proof": proof.difference,
                "seconds": own,
                "widths": [int(found.keep[g.channels].sum()) for g in seen.structure.groups],
            }
        )
    return rows


def finished(seen: recoup.Calibration, allocation: recoup.Allocation) -> tuple[nn.Module, Any]:
    """The smaller network, and the proof that it is right."""
    plan = recoup.recover(seen, allocation).plan
    smaller = recoup.apply(seen.model, plan)
    return smaller, recoup.verify(seen.model, plan, smaller, seen.traced.inputs)


def table(rows: Sequence[dict[str, Any]], published: Sequence[Published] = ()) -> str:
    """Averages over calibration samples, as Markdown; `published` adds columns with the paper's own figures."""
    figures = {figure.tolerance: figure for figure in published}
    theirs = "FLOPs drop, paper | test drop, paper | " if published else ""
    times = f"; paper: {PUBLISHED_SECONDS} on {PUBLISHED_WITH}" if published else ""
    lines = [
        f"| tolerance | {theirs}MACs drop | validation drop (worst) | test drop | KL | "
        f"seconds: statistics + selection + search + finish ({made_with(rows)}{times}) |",
        "|---" * (8 if published else 6) + "|",
    ]
    for tolerance in sorted({row["tolerance"] for row in rows}):
        mine = [row for row in rows if row["tolerance"] == tolerance]

        def mean(key: str, rows: list[dict[str, Any]] = mine) -> float:
            return float(sum(row[key] for row in rows) / len(rows))

        spread = " / ".join(f"{row['macs_drop']:.1f}" for row in mine)
        stages = [sum(r["seconds"][s] for r in mine) / len(mine) for s in STAGES]
        worst = max(row["validation_drop"] for row in mine)
        lines.append(
            f"| {tolerance} | {published_cells(figures, tolerance)}{mean('macs_drop'):.1f} ({spread}) | "
            f"{mean('validation_drop'):.2f} ({worst:.2f}) | {mean('test_drop'):.2f} | {mean('kl'):.3f} | "
            f"{' + '.join(f'{s:.1f}' for s in stages)} = {sum(stages):.1f} |"
        )
    return "\n".join(lines)


def published_cells(figures: dict[float, Published], tolerance: float) -> str:
    """The two cells of the paper's figures; dashes at a tolerance that it has not, nothing where it has none at all."""
    if not figures:
        return ""
    figure = figures.get(tolerance)
    return "- | - | " if figure is None else f"{figure.removed} | {figure.test_drop:.2f} | "


def made_with(rows: Iterable[dict[str, Any]]) -> str:
    """The machine and the number of calibration images behind some rows."""
    found = dict.fromkeys((row.get("device", DEVICE), row.get("images", IMAGES)) for row in rows)
    return " or ".join(f"{device}, {images:,} images" for device, images in found)


def seconds_of(row: dict[str, Any]) -> float:
    """What one tolerance takes, tracing not counted."""
    return float(sum(row["seconds"][stage] for stage in STAGES))


def stored_searches(networks: Iterable[str], folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of the paper's search that are in the results, each with the name of its network."""
    paths = {network: folder / f"{network}_cifar10_paper.json" for network in networks}
    return [
        {"network": network, **row}
        for network, path in paths.items()
        if path.exists()
        for row in json.loads(path.read_text())
    ]


def resident(options: argparse.Namespace, spec: Any, split: str, limit: int | None = None, seed: int = 0) -> Batches:
    """A split as batches that stay on the device."""
    data = open_data(f"cifar10:{options.cifar}@{split}", spec, batch_size=options.batch, limit=limit, seed=seed)
    return [(images.to(options.device), labels.to(options.device)) for images, labels in data]


def method_of(options: argparse.Namespace, seed: int) -> Method:
    """The method with the fields that were said; 0 positions are all of them."""
    said = {name: getattr(options, name) for name in FIELDS if getattr(options, name) is not None}
    if "positions" in said:
        said["positions"] = said["positions"] or None
    return METHODS[options.method](seed=seed, **said)


def timed(seconds: dict[str, float], stage: str, work: Any) -> Any:
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[stage] = time.perf_counter() - start
    return result


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", default=os.environ.get("RECOUP_CIFAR10"), help="folder with cifar-10-batches-py")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--model", default="recoup:vgg16_bn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="paper", choices=list(METHODS))
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tolerances", type=float, nargs="+", default=TOLERANCES)
    parser.add_argument("--ridge", type=float)
    parser.add_argument("--positions", type=int, help="0 for all")
    parser.add_argument("--weighting")
    parser.add_argument("--order")
    parser.add_argument("--constraint")
    parser.add_argument("--selector")
    parser.add_argument("--keep-class", action="store_true", help="prune only what the network's class can hold")
    parser.add_argument("--out")
    options = parser.parse_args(words)
    has = {field.name for field in dataclasses.fields(METHODS[options.method])}
    unknown = [f"--{name}" for name in FIELDS if getattr(options, name) is not None and name not in has]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no option of the method {options.method}")
    return options


if __name__ == "__main__":
    main()
