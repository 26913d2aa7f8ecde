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
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.data import open_data
from recoup.models import open_model
from recoup.settings import Settings, find_preset
from recoup.structure.cost import cost
from recoup.structure.verify import prove

TOLERANCES = (0.5, 1.0, 1.5, 2.0, 2.5)
PAPER = {0.5: 43.23, 1.0: 50.90, 1.5: 56.77, 2.0: 59.72, 2.5: 65.61}  # FLOPs drop in percent, arXiv 2108.13728
Batches = list[tuple[Tensor, Tensor]]


def main() -> None:
    options = parse()
    opened = open_model(options.model, options.weights)
    model = opened.model.to(options.device)
    splits = {name: resident(options, opened.input, name) for name in ("validation", "test")}
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        batches = resident(options, opened.input, "calibration", limit=options.images, seed=seed)
        settings = settings_of(options, seed)
        rows += one_sample(model, batches, splits, settings, options.tolerances, keep_class=options.keep_class)
    print(json.dumps({"device": device_name(options.device), "preset": options.preset, "rows": rows}))
    print(table(rows, PAPER if options.model == "recoup:vgg16_bn" else {}))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))


def one_sample(
    model: nn.Module,
    batches: Batches,
    splits: dict[str, Batches],
    settings: Settings,
    tolerances: Iterable[float],
    *,
    keep_class: bool,
) -> list[dict[str, Any]]:
    """Rows for every tolerance at one calibration sample."""
    seconds: dict[str, float] = {}
    traced = timed(seconds, "trace", lambda: recoup.trace(model, batches[0], keep_class=keep_class))
    seen = timed(seconds, "calibrate", lambda: recoup.calibrate(model, traced, batches, settings))
    rankings = timed(seconds, "select", lambda: recoup.select(seen))
    base = {name: recoup.accuracy(model, data) for name, data in splits.items()}
    before = cost(seen.structure, model).macs

    def measure(candidate: nn.Module) -> float:
        return recoup.accuracy(candidate, splits["validation"])

    rows = []
    for tolerance in tolerances:
        own = dict(seconds)
        found = timed(own, "search", lambda t=tolerance: recoup.search(model, seen, rankings, measure, t))
        smaller, proof = timed(
            own, "finish", lambda f=found: prove(model, recoup.compensate(seen, f.keep), traced.inputs)
        )
        rows.append(
            {
                "seed": settings.seed,
                "tolerance": tolerance,
                "macs_drop": 100 * (1 - cost(seen.structure, model, found.keep).macs / before),
                "validation_drop": base["validation"] - recoup.accuracy(smaller, splits["validation"]),
                "test_drop": base["test"] - recoup.accuracy(smaller, splits["test"]),
                "kl": recoup.divergence(smaller, model, splits["test"]),
                "proof": proof.difference,
                "seconds": own,
                "widths": [int(found.keep[g.channels].sum()) for g in seen.structure.groups],
            }
        )
    return rows


def table(rows: list[dict[str, Any]], paper: Mapping[float, float] = MappingProxyType({})) -> str:
    """Averages over calibration samples, as Markdown; `paper` adds a column with its FLOPs drops."""
    lines = [
        f"| tolerance | {'FLOPs drop, paper | ' if paper else ''}MACs drop | validation drop (worst) | test drop | "
        "KL | seconds: statistics + selection + search + finish |",
        "|---" * (7 if paper else 6) + "|",
    ]
    for tolerance in sorted({row["tolerance"] for row in rows}):
        mine = [row for row in rows if row["tolerance"] == tolerance]

        def mean(key: str, rows: list[dict[str, Any]] = mine) -> float:
            return float(sum(row[key] for row in rows) / len(rows))

        spread = " / ".join(f"{row['macs_drop']:.1f}" for row in mine)
        stages = [sum(r["seconds"][s] for r in mine) / len(mine) for s in ("calibrate", "select", "search", "finish")]
        worst = max(row["validation_drop"] for row in mine)
        lines.append(
            f"| {tolerance} | {f'{paper[tolerance]} | ' if paper else ''}{mean('macs_drop'):.1f} ({spread}) | "
            f"{mean('validation_drop'):.2f} ({worst:.2f}) | {mean('test_drop'):.2f} | {mean('kl'):.3f} | "
            f"{' + '.join(f'{s:.1f}' for s in stages)} = {sum(stages):.1f} |"
        )
    return "\n".join(lines)


def resident(options: argparse.Namespace, spec: Any, split: str, limit: int | None = None, seed: int = 0) -> Batches:
    """A split as batches that stay on the device."""
    data = open_data(f"cifar10:{options.cifar}@{split}", spec, batch_size=options.batch, limit=limit, seed=seed)
    return [(images.to(options.device), labels.to(options.device)) for images, labels in data]


def settings_of(options: argparse.Namespace, seed: int) -> Settings:
    changes: dict[str, Any] = {"seed": seed}
    for name in ("ridge", "weighting", "order", "constraint", "selector"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    if options.positions is not None:
        changes["positions"] = options.positions or None
    return dataclasses.replace(find_preset(options.preset), **changes)


def timed(seconds: dict[str, float], stage: str, work: Any) -> Any:
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[stage] = time.perf_counter() - start
    return result


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", default=os.environ.get("RECOUP_CIFAR10"), help="folder with cifar-10-batches-py")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--model", default="recoup:vgg16_bn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--images", type=int, default=20_000)
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
    return parser.parse_args()


if __name__ == "__main__":
    main()
