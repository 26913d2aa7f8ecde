"""Rows of the paper's search that were stored before there were experiments: `*_paper.json` and `*_released.json`.

They are what `recoup.Paper()` and `recoup.Released()` made of networks for CIFAR-10, by tolerance and calibration
sample. `python -m benchmarks.paper table2` measures the same today and writes rows of another form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.published import PUBLISHED_SECONDS, PUBLISHED_WITH, Published

SEARCH = "paper's search (our run)"
# The stages that are timed for one tolerance; the first trace of a process is mostly the start-up of torch.export.
STAGES = ("calibrate", "select", "search", "finish")
# What rows were made with that do not say so.
DEVICE, IMAGES = "NVIDIA H200", 20_000
RESULTS = Path(__file__).parents[1] / "results"


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
