"""Figures 4, 7 and 8: how much of every layer goes, as lines over the layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.paper.cases import Case, Row, grouped, markdown, measured, shown
from benchmarks.paper.drawing import draw_sparsity, panels

Key = Callable[[Case], Hashable]


def profile(rows: Sequence[Row]) -> list[float]:
    """The share of channels removed from every layer, from the first to the last, averaged over samples."""
    layers = list(rows[0].outcome.sparsity)
    return [fmean(row.outcome.sparsity[layer] for row in rows) for layer in layers]


def sparsity_table(rows: Sequence[Row], what: str, label: Callable[[Case], str]) -> str:
    """One line per series: what goes, what it costs, and the percent of the channels of every layer that go."""
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.tolerance, label(case))):
        case, found = mine[0].case, measured(mine)
        shares = " ".join(f"{100 * share:.0f}" for share in profile(found)) if found else "-"
        sums = [shown(mine, "flops", ".1f"), shown(mine, "validation_drop"), shown(mine, "test_drop")]
        lines.append([case.network, label(case), str(case.tolerance), *sums, shares])
    head = (
        "network", what, "tolerance", "FLOPs removed, %", "validation drop", "test drop",
        "% of the channels removed, first layer to last",
    )  # fmt: skip
    return markdown(head, lines)


def draw_profiles(rows: Sequence[Row], panel_of: Key, label: Callable[[Case], str], title: Key) -> Figure:
    """A panel for every key, a line for every label."""
    groups = grouped(measured(rows), panel_of)
    figure, axes = panels(len(groups), columns=2, height=3.4)
    for panel, mine in zip(axes, groups, strict=True):
        series = {label(group[0].case): profile(group) for group in grouped(mine, label)}
        draw_sparsity(panel, series)
        panel.set_title(str(title(mine[0].case)))
    return figure
