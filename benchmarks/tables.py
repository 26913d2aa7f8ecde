"""Regenerate the tables of docs/results.md and the picture of the README from the measurements in benchmarks/results/.

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

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
TABLES_OF_ROWS = {"best": best.table, "tolerance": best.table, "ablation": ablation.table}
BLUE, GREY = "#2563eb", "#94a3b8"


def main() -> None:
    page = DOCS / "results.md"
    text = page.read_text()
    for path in sorted(RESULTS.glob("*.json")):
        text = replace_table(text, path.stem, table(path))
    page.write_text(text)
    draw(json.loads((RESULTS / "vgg16_cifar10_paper.json").read_text()), DOCS / "vgg16_cifar10.svg")


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
        color="#f97316",
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


if __name__ == "__main__":
    main()
