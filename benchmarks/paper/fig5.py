"""Figure 5: every selector under the same compensation and the same search.

Varies the selector, the tolerance and the calibration sample.

Asserts: every selector stays within its tolerance; forward and backward remove more than random.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.paper.cases import Case, Row, average, grouped, markdown, measured, shown
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.drawing import colour, legend_beside, marker, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.published import TOLERANCES
from benchmarks.paper.selectors import CAP, RANDOM, selectors_of

HEAD = ("network", "selector", "tolerance", "FLOPs removed, %", "validation drop", "test drop", "KL", "selection, s")


def cases(options: Options) -> list[Case]:
    tolerances = options.tolerances or ((2.0, 5.0) if options.smoke else TOLERANCES)
    return [
        Case(network, seed=seed, tolerance=tolerance, selector=selector)
        for network in at_hand(("vgg16",), options)
        for seed in range(options.seeds or (2 if options.smoke else 3))
        for selector in selectors_of(options)
        for tolerance in tolerances
    ]


def table(rows: Sequence[Row]) -> str:
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.selector, case.tolerance)):
        case = mine[0].case
        seconds = [row.outcome.stages["selection"] for row in mine if "selection" in row.outcome.stages]
        lines.append(
            [
                *(case.network, case.selector, str(case.tolerance), shown(mine, "flops", ".1f")),
                *(shown(mine, "validation_drop"), shown(mine, "test_drop"), shown(mine, "kl", ".3f")),
                f"{sum(seconds) / len(seconds):.1f}" if seconds else "-",
            ]
        )
    return markdown(HEAD, lines)


def draw(rows: Sequence[Row]) -> Figure:
    """Points lost over FLOPs removed: the mean of the samples at every tolerance, bars of one standard deviation."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=1, height=4.6)
    for panel, mine in zip(axes, networks, strict=True):
        for place, group in enumerate(grouped(mine, lambda case: case.selector)):
            at = sorted(grouped(group, lambda case: case.tolerance), key=lambda each: each[0].case.tolerance or 0.0)
            panel.errorbar(
                [average(each, "flops") for each in at], [average(each, "test_drop") for each in at],
                xerr=[_spread(each, "flops") for each in at], yerr=[_spread(each, "test_drop") for each in at],
                fmt=f"{marker(place)}-", color=colour(place), label=group[0].case.selector, markersize=4, linewidth=1,
                elinewidth=0.5,
            )  # fmt: skip
        panel.set(xlabel="% of the FLOPs removed", ylabel="points lost on test")
        panel.set_title(f"{mine[0].case.network}: one search, one compensation, every selector")
    legend_beside(figure, axes[0])
    return figure


def _spread(rows: Sequence[Row], of: str) -> float:
    """The standard deviation; 0 of a single sample."""
    mean = average(rows, of)
    squares = [(getattr(row.outcome, of) - mean) ** 2 for row in rows]
    return float((sum(squares) / max(1, len(squares) - 1)) ** 0.5)


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for mine in grouped(measured(rows), lambda case: case.network):
        random = measured(mine, selector=RANDOM)
        for selector in CAP:
            ours = measured(mine, selector=selector)
            if ours and random:
                more, less = average(ours, "flops"), average(random, "flops")
                require(more > less, f"{selector} removes {more:.1f} %, random {less:.1f} %")


EXPERIMENT = Experiment("fig5", "Selectors under one search and one compensation", cases, table, draw, check)
