"""Regenerate the tables of docs/ and the pictures, from the rows in benchmarks/results/.

python -m benchmarks.tables              # tables of docs/ and docs/lab/, both pictures; paper.md and its figures
python -m benchmarks.tables --pictures   # the two pictures alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import ablation, best, efficientnet, language, quantised, shipped, streams, units
from benchmarks import tolerance as untouched
from benchmarks.networks import CIFAR
from benchmarks.pages import replace_table
from benchmarks.paper import searches as stored
from benchmarks.paper.experiment import publish, stored_rows
from benchmarks.paper.published import PUBLISHED, TOLERANCES, Published
from benchmarks.paper.registry import EXPERIMENTS
from benchmarks.paper.searches import SEARCH
from benchmarks.rows import Plain, alike

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
TABLES_OF_ROWS = {
    "tolerance": best.table,
    "untouched": untouched.table,
    "ablation": ablation.table,
    "held_out": ablation.table,
    "shipped": shipped.table,
    "quantised": quantised.table,
    "units": units.table,
    "language": language.table,
    "streams": streams.table,
}
BLUE, GREY, ORANGE, GREEN = "#2563eb", "#94a3b8", "#f97316", "#059669"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", action="store_true", help="leave the tables as they are")
    if not parser.parse_args().pictures:
        pages = [DOCS / f"{name}.md" for name in ("results", "more-results", "language", "reliability")]
        for page in (*pages, *sorted((DOCS / "lab").glob("*.md"))):
            page.write_text(with_tables(page.read_text()))
        for name, experiment in EXPERIMENTS.items():
            rows = stored_rows(RESULTS / "paper" / f"{name}.json")
            if rows:
                publish(experiment, rows, DOCS)
    searches = read("vgg16_cifar10_paper")
    draw(searches, DOCS / "vgg16_cifar10.svg")
    draw_headline(read("best")["rows"], searches, read("efficientnet"), DOCS / "headline.svg")


def with_tables(text: str) -> str:
    """The page with the tables of all files of results."""
    for path in sorted(RESULTS.glob("*.json")):
        text = replace_table(text, path.stem, table(path))
    return text


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(path: Path) -> str:
    """The measurements in a file, in the form of the benchmark that made them."""
    content = json.loads(path.read_text())
    if path.stem.startswith("efficientnet"):
        return efficientnet.table(content)
    if path.stem == "best":
        return best.table(content["rows"], stored.stored_searches(CIFAR))
    if path.stem in TABLES_OF_ROWS:
        return TABLES_OF_ROWS[path.stem](content["rows"])
    return stored.table(content, PUBLISHED if path.stem.startswith("vgg16") else ())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """MACs removed by tolerance beside the paper's, and what that costs on the test set."""
    plt.rcParams["svg.hashsalt"] = "recoup"
    tolerances = sorted({row["tolerance"] for row in rows})
    figures = {figure.tolerance: figure for figure in PUBLISHED}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for i, tolerance in enumerate(tolerances):
        found = [row["macs_drop"] for row in rows if row["tolerance"] == tolerance]
        left.bar(i - 0.2, figures[tolerance].removed, 0.38, color=GREY, label="paper, as published" if not i else None)
        left.bar(
            i + 0.2, sum(found) / len(found), 0.38, color=BLUE, label=f"{SEARCH}, mean of 3 samples" if not i else None
        )
        left.scatter(
            [i + 0.2] * len(found), found, s=12, color="black", zorder=3, label="each sample" if not i else None
        )
    left.set_xticks(range(len(tolerances)), [str(t) for t in tolerances])
    left.set(xlabel="tolerance (points of validation accuracy)", ylabel="% of the FLOPs removed", ylim=(30, 85))
    left.legend(fontsize=8, loc="upper left", frameon=False)
    right.axline((0, 0), slope=1, color=GREY, linestyle=":", linewidth=1)
    right.scatter(
        [row["tolerance"] for row in rows], [row["validation_drop"] for row in rows],
        color=BLUE, s=18, label="validation, our run",
    )  # fmt: skip
    right.scatter(
        [row["tolerance"] for row in rows], [row["test_drop"] for row in rows],
        color=ORANGE, s=18, marker="x", label="test, our run",
    )  # fmt: skip
    right.plot(
        TOLERANCES, [figure.test_drop for figure in PUBLISHED], "s", color=GREY, markersize=5,
        label="test, paper as published",
    )  # fmt: skip
    right.set(xlabel="tolerance", ylabel="points lost", xlim=(0, 2.8), ylim=(0, 2.8))
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("VGG-16, CIFAR-10, the paper's search, no retraining", fontsize=11)
    figure.savefig(path, metadata={"Date": None})


@dataclass(frozen=True, slots=True)
class Points:
    """Some networks: percent of the MACs removed, and points lost on the test images."""

    removed: Sequence[float]
    lost: Sequence[float]


def published_points(figures: Sequence[Published] = PUBLISHED) -> Points:
    """The paper's own figures; what it lost on the test images is less than the tolerance it was allowed."""
    return Points([figure.removed for figure in figures], [figure.test_drop for figure in figures])


def searched_points(searches: Sequence[Plain]) -> Points:
    """Our run of the paper's search, every sample and tolerance."""
    return Points([row["macs_drop"] for row in searches], [row["test_drop"] for row in searches])


def points_at_shares(rows: Sequence[Plain], network: str, method: str) -> Points:
    """A method at fixed shares, the mean over calibration samples."""
    mine = [row for row in rows if (row["network"], row["method"]) == (network, method)]
    groups = alike(sorted(mine, key=lambda row: float(row["share"])), "share")
    return Points(
        [100 * group[0]["share"] for group in groups],
        [sum(row["test_drop"] for row in group) / len(group) for group in groups],
    )


def draw_headline(best_rows: list[Plain], searches: list[Plain], lite0: dict[str, Any], path: Path) -> None:
    """What MACs cost in points: by the default beside the paper's search, and on ImageNet beside other methods."""
    plt.rcParams["svg.hashsalt"] = "recoup"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_losses(left, best_rows, searches)
    methods = {
        "recoup best": BLUE, best.UNIFORM: GREEN, "L2 + batch norm": GREY, "Torch-Pruning + batch norm": "#cbd5e1",
    }  # fmt: skip
    shares = (0.8, 0.7)
    for number, (method, colour) in enumerate(methods.items()):
        rows = {row["share"]: row for row in lite0["rows"] if row["method"] == method}
        lost = [lite0["base"] - rows[share]["top1"] for share in shares]
        places = [place + 0.2 * (number - 1.5) for place in range(len(shares))]
        bars = right.bar(places, lost, 0.18, color=colour, label=method)
        right.bar_label(bars, fmt="%.1f", fontsize=7)
    right.set_xticks(range(len(shares)), [f"{1 - share:.0%} of the MACs removed" for share in shares])
    right.set(ylabel="points lost", title="EfficientNet-Lite0, ImageNet (74.6 % top-1)")
    right.legend(fontsize=8, loc="upper left", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(path, metadata={"Date": None})


def draw_losses(axes: Any, best_rows: Sequence[Plain], searches: Sequence[Plain]) -> None:
    """VGG-16 on CIFAR-10: points lost on the test images by the MACs removed."""
    ours, uniform = (points_at_shares(best_rows, "vgg16", method) for method in (best.BEST, best.UNIFORM))
    found, published = searched_points(searches), published_points()
    axes.plot(ours.removed, ours.lost, "o-", color=BLUE, label="recoup best")
    axes.plot(published.removed, published.lost, "s", color=GREY, markersize=5, label="paper, as published")
    axes.scatter(found.removed, found.lost, s=18, color=ORANGE, marker="x", label=SEARCH)
    axes.plot(uniform.removed, uniform.lost, "v:", color=GREEN, markersize=5, label=best.UNIFORM)
    axes.set(xlabel="% of the MACs removed", ylabel="points lost on test", ylim=(0, 5), title="VGG-16, CIFAR-10")
    axes.legend(fontsize=8, loc="upper left", frameon=False)


if __name__ == "__main__":
    main()
