"""The slope g' of the activation behind a layer: what weighing the statistics by its square brings.

The paper calls it critical and gives no figures. Its text has a vector, a slope for every output; its closed form has
one covariance. Varies the weighting of the paper's search: none, one weight for every position (the mean over the
outputs), one for every output; the tolerance and the calibration sample.

Asserts: every weighting stays within its tolerance and removes something; they do not all give the same widths.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.paper.cases import Case, Row, average, grouped, markdown, measured, shown, values
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.drawing import colour, marker, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand

WEIGHTINGS = {"none": "none", "slope": "one per position", "outputs": "one per output"}
HEAD = (
    "network", "weights", "tolerance", "FLOPs removed, %", "validation drop", "test drop", "KL", "statistics, s",
    "selection, s", "search, s",
)  # fmt: skip
STAGES = ("statistics", "selection", "search")


def cases(options: Options) -> list[Case]:
    return [
        Case(network, seed=seed, tolerance=tolerance, weighting=weighting)
        for network in at_hand(("vgg16",), options)
        for seed in range(options.seeds or (1 if options.smoke else 3))
        for weighting in WEIGHTINGS
        for tolerance in options.tolerances or ((4.0,) if options.smoke else (1.0, 2.0))
    ]


def table(rows: Sequence[Row]) -> str:
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.weighting, case.tolerance)):
        case = mine[0].case
        sums = [shown(mine, of, form) for of, form in (("flops", ".1f"), ("validation_drop", ".2f"))]
        sums += [shown(mine, of, form) for of, form in (("test_drop", ".2f"), ("kl", ".3f"))]
        lines.append(
            [case.network, WEIGHTINGS[case.weighting], str(case.tolerance), *sums]
            + [_mean_stage(mine, stage) for stage in STAGES]
        )
    return markdown(HEAD, lines)


def _mean_stage(rows: Sequence[Row], stage: str) -> str:
    found = [row.outcome.stages[stage] for row in measured(rows)]
    return f"{sum(found) / len(found):.1f}" if found else "-"


def draw(rows: Sequence[Row]) -> Figure:
    """Points lost over FLOPs removed, a mark for every sample."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), columns=1, height=3.8)
    for panel, mine in zip(axes, networks, strict=True):
        for place, group in enumerate(grouped(mine, lambda case: case.weighting)):
            label = f"weights: {WEIGHTINGS[group[0].case.weighting]}"
            removed, lost = values(group, "flops"), values(group, "test_drop")
            panel.plot(removed, lost, marker(place), color=colour(place), markersize=5, label=label)
        panel.set(xlabel="% of the FLOPs removed", ylabel="points lost on test", title=mine[0].case.network)
        panel.legend()
    return figure


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for mine in grouped(measured(rows), lambda case: (case.network, case.tolerance)):
        ways = grouped(mine, lambda case: case.weighting)
        for way in ways:
            require(average(way, "flops") > 0, f"{way[0].case} removes nothing")
        found = {tuple(row.outcome.sparsity.values()) for row in mine if row.case.seed == mine[0].case.seed}
        require(len(found) > 1 or len(ways) == 1, f"{mine[0].case.network}: the weighting decides nothing")


EXPERIMENT = Experiment("weighting", "Weights by the slope of the activation", cases, table, draw, check)
