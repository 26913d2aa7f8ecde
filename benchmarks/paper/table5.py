"""Table V: FLOPs removed by the order in which the search visits layers, over the tolerances.

Varies the order (bottom-up, top-down, random) and the tolerance. The paper has VGG-19 on CIFAR-100; ours are networks
for CIFAR-10.

Asserts: every order stays within its tolerance, and removes something.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.paper.cases import Case, Row, against, average, grouped, markdown, measured, shown
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.drawing import INK, colour, marker, panels
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.published import ORDER_TOLERANCES, ORDERS

HEAD = (
    "network", "order", "tolerance", "FLOPs removed, %: paper, VGG-19 on CIFAR-100 | ours | difference",
    "validation drop", "test drop",
)  # fmt: skip


def cases(options: Options) -> list[Case]:
    tolerances = options.tolerances or ((2.0, 6.0) if options.smoke else ORDER_TOLERANCES)
    return [
        Case(network, seed=seed, tolerance=tolerance, order=order)
        for network in at_hand(("vgg16", "vgg19", "resnet50"), options)
        for seed in range(options.seeds or 1)
        for order in ORDERS
        for tolerance in tolerances
    ]


def table(rows: Sequence[Row]) -> str:
    lines = []
    for mine in grouped(rows, lambda case: (case.network, case.order, case.tolerance)):
        case = mine[0].case
        figures = dict(zip(ORDER_TOLERANCES, ORDERS[case.order], strict=True))
        removed = against(mine, "flops", figures.get(case.tolerance or 0.0))
        lines.append(
            [
                *(case.network, case.order, str(case.tolerance), removed),
                *(shown(mine, "validation_drop"), shown(mine, "test_drop")),
            ]
        )
    return markdown(HEAD, lines)


def draw(rows: Sequence[Row]) -> Figure:
    """FLOPs removed over the tolerance, a line for every order; the paper's in grey."""
    networks = grouped(measured(rows), lambda case: case.network)
    figure, axes = panels(len(networks), height=3.4)
    for panel, mine in zip(axes, networks, strict=True):
        for place, group in enumerate(grouped(mine, lambda case: case.order)):
            order, at = group[0].case.order, sorted(grouped(group, lambda case: case.tolerance), key=_tolerance)
            points = [average(each, "flops") for each in at]
            panel.plot(list(map(_tolerance, at)), points, f"{marker(place)}-", color=colour(place), label=order)
            panel.plot(ORDER_TOLERANCES, ORDERS[order], f"{marker(place)}:", color=INK, markersize=3)
        panel.set(xlabel="tolerance", ylabel="% of the FLOPs removed", title=f"{mine[0].case.network} (dotted: paper)")
        panel.legend()
    return figure


def _tolerance(group: Sequence[Row]) -> float:
    return group[0].case.tolerance or 0.0


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for row in measured(rows):
        require((row.outcome.flops or 0.0) > 0, f"{row.case} removes nothing")


EXPERIMENT = Experiment("table5", "FLOPs removed by visiting order", cases, table, draw, check)
