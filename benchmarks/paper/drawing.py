"""Figures as SVG files that are the same whenever they are drawn, on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# A grey that can be read on white and on black: contrast of 4 to either.
INK = "#7d8590"
BLUE, ORANGE, GREEN, RED = "#3b82f6", "#f97316", "#10b981", "#ef4444"
COLOURS = (
    BLUE, ORANGE, GREEN, RED, "#a855f7", "#eab308", "#14b8a6", "#ec4899", "#84cc16", "#6366f1", "#f59e0b", "#06b6d4",
    "#d946ef", "#22c55e", "#fb7185", "#8b5cf6",
)  # fmt: skip
MARKERS = "osv^D<>phXP*d8HP"
STYLE: Any = {
    "svg.hashsalt": "recoup",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 9,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Figures made inside have the style."""
    with plt.rc_context(rc=STYLE):
        yield
    plt.close("all")


def panels(count: int = 1, *, columns: int = 3, height: float = 3.4) -> tuple[Figure, list[Any]]:
    """A figure with so many axes."""
    across = min(count, columns)
    down = -(-count // across)
    figure, grid = plt.subplots(
        down, across, figsize=(max(6.4, 3.2 * across), height * down), layout="constrained", squeeze=False
    )
    axes = [each for line in grid for each in line]
    for empty in axes[count:]:
        empty.set_visible(False)
    return figure, axes[:count]


def save(figure: Figure, path: Path) -> None:
    """Write it without date or random names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": "recoup"})


def legend_beside(figure: Figure, axes: Any) -> None:
    """One legend for all panels, at the right of them, where many series hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def colour(place: int) -> str:
    """The colour of a series by its place."""
    return COLOURS[place % len(COLOURS)]


def marker(place: int) -> str:
    """The marker of a series by its place."""
    return MARKERS[place % len(MARKERS)]


def draw_sparsity(axes: Any, series: Mapping[str, Sequence[float]]) -> None:
    """Percent of the channels removed from layer to layer, one line each."""
    for place, (label, shares) in enumerate(series.items()):
        layers = range(1, len(shares) + 1)
        points = [100 * share for share in shares]
        axes.plot(layers, points, f"{marker(place)}-", color=colour(place), label=label, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="% of the channels removed", ylim=(-3, 103))
    axes.legend()
