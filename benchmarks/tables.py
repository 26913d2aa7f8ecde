"""Regenerate the tables and pictures of docs/results.md and the README from the measurements in benchmarks/results/.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import ablation, best, efficientnet, paper
from benchmarks.paper import PAPER
from benchmarks.rows import Plain, alike

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
TABLES_OF_ROWS = {
    "best": best.table, "tolerance": best.table, "ablation": ablation.table, "held_out": ablation.table,
}  # fmt: skip
BLUE, GREY, ORANGE = "#2563eb", "#94a3b8", "#f97316"


def main() -> None:
    page = DOCS / "results.md"
    text = page.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        text = replace_table(text, path.stem, table(path))
    page.write_text(text)
    published = read("vgg16_cifar10_paper")
    draw(published, DOCS / "vgg16_cifar10.svg")
    draw_headline(read("best")["rows"], published, read("efficientnet"), DOCS / "headline.svg")


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(path: Path) -> str:
    """The measurements in a file, in the form of the benchmark that made them."""
    content = json.loads(path.read_text())
    if path.stem.startswith("efficientnet"):
        return efficientnet.table(content)
    if path.stem in TABLES_OF_ROWS:
        return TABLES_OF_ROWS[path.stem](content["rows"])
    return paper.table(content, PAPER if path.stem.startswith("vgg16") else {})


def replace_table(text: str, name: str, table_text: str) -> str:
    """Put a table between the comments `<!-- name -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{table_text}\n{match[2]}", text)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """MACs removed by tolerance beside the paper's, and what that costs on the test set."""
    plt.rcParams["svg.hashsalt"] = "recoup"
    tolerances = sorted({row["tolerance"] for row in rows})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for i, tolerance in enumerate(tolerances):
        found = [row["macs_drop"] for row in rows if row["tolerance"] == tolerance]
        left.bar(i - 0.2, PAPER[tolerance], 0.38, color=GREY, label="paper" if not i else None)
        left.bar(
            i + 0.2, sum(found) / len(found), 0.38, color=BLUE, label="recoup, mean of 3 samples" if not i else None
        )
        left.scatter(
            [i + 0.2] * len(found), found, s=12, color="black", zorder=3, label="each sample" if not i else None
        )
    left.set_xticks(range(len(tolerances)), [str(t) for t in tolerances])
    left.set(xlabel="tolerance (points of validation accuracy)", ylabel="% of the FLOPs removed", ylim=(30, 80))
    left.legend(fontsize=8, loc="upper left", frameon=False)
    right.axline((0, 0), slope=1, color=GREY, linestyle=":", linewidth=1)
    right.scatter(
        [row["tolerance"] for row in rows],
        [row["validation_drop"] for row in rows],
        color=BLUE,
        s=18,
        label="validation",
    )
    right.scatter(
        [row["tolerance"] for row in rows],
        [row["test_drop"] for row in rows],
        color=ORANGE,
        s=18,
        marker="x",
        label="test",
    )
    right.set(xlabel="tolerance", ylabel="points lost", xlim=(0, 2.8), ylim=(0, 2.8))
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("VGG-16, CIFAR-10, no retraining", fontsize=11)
    figure.savefig(path, metadata={"Date": None})


def draw_headline(best_rows: list[Plain], published: list[Plain], lite0: dict[str, Any], path: Path) -> None:
    """What MACs cost in points: by the default beside the paper's method, and on ImageNet beside other methods."""
    plt.rcParams["svg.hashsalt"] = "recoup"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ours = [row for row in best_rows if (row["network"], row["method"]) == ("vgg16", "best")]
    groups = alike(sorted(ours, key=lambda row: row["share"]), "share")
    left.plot(
        [100 * group[0]["share"] for group in groups],
        [sum(row["test_drop"] for row in group) / len(group) for group in groups],
        "o-", color=BLUE, label="recoup, default",
    )  # fmt: skip
    left.scatter(
        [row["macs_drop"] for row in published], [row["test_drop"] for row in published],
        s=18, color=ORANGE, marker="x", label="the paper's method, here",
    )  # fmt: skip
    left.plot(list(PAPER.values()), list(PAPER), "s", color=GREY, markersize=5, label="the paper's figures")
    left.set(xlabel="% of the MACs removed", ylabel="points lost on test", ylim=(0, 2.7), title="VGG-16, CIFAR-10")
    left.legend(fontsize=8, loc="upper left", frameon=False)
    methods = {
        "recoup best": BLUE, "recoup paper": ORANGE, "L2 + batch norm": GREY, "Torch-Pruning + batch norm": "#cbd5e1",
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


if __name__ == "__main__":
    main()
