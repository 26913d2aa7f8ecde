"""Tables I and II: what methods remove within a tolerance, beside the paper's figures and those it quotes of others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.paper.cases import Case, Row, against, grouped, markdown, measured, shown, values
from benchmarks.paper.drawing import BLUE, INK, colour, marker, panels
from benchmarks.paper.opening import at_hand
from benchmarks.paper.published import Published, Rival

HEAD = (
    "network", "method", "tolerance", "FLOPs removed, %: paper | ours | difference",
    "test drop: paper | ours | difference", "validation drop", "KL", "evaluations", "seconds",
)  # fmt: skip


def comparison_cases(
    wanted: Sequence[str], methods: Sequence[str], tolerances: Sequence[float], seeds: int, options: argparse.Namespace
) -> list[Case]:
    """Every method at every tolerance, sample after sample."""
    return [
        Case(network, method, seed, tolerance)
        for network in at_hand(wanted, options)
        for seed in range(options.seeds or seeds)
        for method in options.methods or methods
        for tolerance in options.tolerances or tolerances
    ]


def comparison_table(rows: Sequence[Row], published: Sequence[Published], rivals: Sequence[Rival]) -> str:
    """Means over samples, then the rivals as the paper quotes them; the paper's figure is that of its tolerance."""
    figures = {figure.tolerance: figure for figure in published}
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.method, case.tolerance)):
        case = mine[0].case
        figure = figures.get(case.tolerance or 0.0)
        lines.append(
            [
                case.network,
                case.method,
                str(case.tolerance),
                against(mine, "flops", figure.removed if figure else None),
                against(mine, "test_drop", figure.test_drop if figure else None),
                shown(mine, "validation_drop"),
                shown(mine, "kl", ".3f"),
                shown(mine, "evaluations", ".0f"),
                shown(mine, "seconds", ".1f"),
            ]
        )
    cited = [
        ["as published", f"{each.name}, retrained", "-", f"{each.removed:.2f} | - | -", f"{each.test_drop:.2f} | - | -"]
        for each in rivals
    ]
    return markdown(HEAD, [*lines, *([*cells, "-", "-", "-", "-"] for cells in cited)])


def draw_comparison(rows: Sequence[Row], published: Sequence[Published], rivals: Sequence[Rival]) -> Figure:
    """Points lost on the test images over the FLOPs removed, a panel for every network."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=2, height=3.8)
    for panel, mine in zip(axes, networks, strict=True):
        _draw_published(panel, published, rivals)
        for place, group in enumerate(grouped(mine, lambda case: case.method)):
            panel.plot(
                values(group, "flops"), values(group, "test_drop"), marker(place), color=colour(place), markersize=5,
                label=f"{group[0].case.method}, our run",
            )  # fmt: skip
        title = f"{mine[0].case.network}, no retraining of ours"
        panel.set(xlabel="% of the FLOPs removed", ylabel="points lost on test", title=title)
        panel.legend()
    return figure


def _draw_published(axes: Any, published: Sequence[Published], rivals: Sequence[Rival]) -> None:
    removed, lost = [each.removed for each in published], [each.test_drop for each in published]
    axes.plot(removed, lost, "s--", color=INK, markersize=5, label="paper, as published")
    for rival in rivals:
        axes.plot(rival.removed, rival.test_drop, "+", color=INK)
        axes.annotate(rival.name, (rival.removed, rival.test_drop), fontsize=6, color=INK, xytext=(2, 2),
                      textcoords="offset points")  # fmt: skip
    axes.axhline(0, color=BLUE, linewidth=0.3)
