"""Figure 5: every selector under the same compensation and the same search.

Varies the selector, the tolerance and the calibration sample.

Asserts: every selector stays within its tolerance; forward and backward remove more than random.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.paper.cases import Case, Row, average, grouped, markdown, measured, shown
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.drawing import colour, legend_beside, marker, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.published import TOLERANCES
from benchmarks.paper.selectors import CAP, RANDOM, selectors_of

# Shares of the FLOPs at which selectors are compared, in percent.
SHARES = (35, 40, 45, 50, 55, 60)


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
    """FLOPs removed by tolerance, then points lost at the same FLOPs."""
    return f"{table_of_tolerances(rows)}\n\n{table_of_shares(rows)}"


def table_of_tolerances(rows: Sequence[Row]) -> str:
    """Percent of the FLOPs removed, and in brackets points lost on test, for every selector and tolerance."""
    tolerances = sorted({row.case.tolerance or 0.0 for row in rows})
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.selector)):
        cells = []
        for tolerance in tolerances:
            found = [row for row in mine if row.case.tolerance == tolerance]
            cells.append(f"{shown(found, 'flops', '.1f')} ({shown(found, 'test_drop')})" if found else "-")
        lines.append([mine[0].case.network, mine[0].case.selector, *cells])
    heads = [f"tolerance {tolerance:g}" for tolerance in tolerances]
    return markdown(("% of the FLOPs removed (points lost on test)", "selector", *heads), lines)


def table_of_shares(rows: Sequence[Row]) -> str:
    """Points lost on test at equal FLOPs, in a line between the means of two tolerances."""
    lines = []
    for mine in grouped(measured(rows), lambda case: (case.network, case.selector)):
        at = sorted((average(each, "flops"), average(each, "test_drop")) for each in grouped(mine, _tolerance))
        cells = [f"{lost:.2f}" if (lost := between(at, share)) is not None else "-" for share in SHARES]
        lines.append([mine[0].case.network, mine[0].case.selector, *cells])
    heads = [f"{share} % removed" for share in SHARES]
    return markdown(("points lost on test, interpolated", "selector", *heads), lines)


def between(points: Sequence[tuple[float, float]], place: float) -> float | None:
    """The height at a place of the line through the points; None outside of them.

    >>> between([(40.0, 1.0), (50.0, 2.0)], 45.0)
    1.5
    """
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= place <= right:
            return high if left == right else low + (high - low) * (place - left) / (right - left)
    return None


def _tolerance(case: Case) -> float:
    return case.tolerance or 0.0


def draw(rows: Sequence[Row]) -> Figure:
    """Points lost over FLOPs removed: the mean of the samples at every tolerance, bars of one standard deviation."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=1, height=4.6)
    for panel, mine in zip(axes, networks, strict=True):
        for place, group in enumerate(grouped(mine, lambda case: case.selector)):
            at = sorted(grouped(group, _tolerance), key=lambda each: _tolerance(each[0].case))
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
