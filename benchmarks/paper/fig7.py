"""Figure 7: sparsity per layer by the order in which the search visits layers.

Varies the order at one tolerance.

Asserts: every order stays within the tolerance; the orders do not all give the same widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.paper.cases import Case, Row, grouped, measured
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.published import ORDERS
from benchmarks.paper.sparsity import draw_profiles, profile, sparsity_table


def cases(options: Options) -> list[Case]:
    return [
        Case(network, seed=seed, tolerance=tolerance, order=order)
        for network in at_hand(("vgg16", "vgg19", "resnet50"), options)
        for seed in range(options.seeds or 1)
        for tolerance in options.tolerances or ((4.0,) if options.smoke else (2.0,))
        for order in ORDERS
    ]


def order_of(case: Case) -> str:
    """The name of the line."""
    return case.order


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for mine in grouped(measured(rows), lambda case: (case.network, case.tolerance)):
        orders = grouped(mine, order_of)
        profiles = {tuple(profile(group)) for group in orders}
        require(len(profiles) > 1 or len(orders) == 1, f"{mine[0].case.network}: the order decides nothing")


EXPERIMENT = Experiment(
    "fig7",
    "Sparsity per layer by visiting order",
    cases,
    partial(sparsity_table, what="order", label=order_of),
    partial(
        draw_profiles,
        panel_of=lambda case: (case.network, case.tolerance),
        label=order_of,
        title=lambda case: f"{case.network}, tolerance {case.tolerance:g}",
    ),
    check,
)
