"""Figure 4: sparsity per layer with the step constraint, and with the whole tolerance from the first layer on.

Varies the constraint of the search; of networks with residual blocks also its unit, block by block or layer by layer.

Asserts: both stay within the tolerance; without the step constraint the first third of the layers loses more, relative
to what all of them lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from benchmarks.paper.cases import Case, Row, grouped, measured
from benchmarks.paper.checks import require, require_within_tolerance
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.opening import at_hand
from benchmarks.paper.sparsity import draw_profiles, profile, sparsity_table

STEP, GLOBAL = "step", "global"
LAYER = "layer"
# Networks of residual blocks; those of the others are layers anyway.
RESIDUAL = ("resnet20", "resnet50", "resnet56", "resnet50-imagenet", "small-resnet")


def cases(options: Options) -> list[Case]:
    return [
        Case(network, seed=seed, tolerance=tolerance, constraint=constraint, unit=unit)
        for network in at_hand(("vgg16", "vgg19", "resnet50"), options)
        for seed in range(options.seeds or 1)
        for tolerance in options.tolerances or ((4.0,) if options.smoke else (1.0, 2.0))
        for constraint, unit in searches_of(network)
    ]


def searches_of(network: str) -> list[tuple[str, str]]:
    """Constraints and units to compare."""
    return [(STEP, ""), (GLOBAL, ""), *([(STEP, LAYER)] if network in RESIDUAL else [])]


def constraint_of(case: Case) -> str:
    """The name of the line."""
    return f"{case.constraint} constraint{', layer by layer' if case.unit == LAYER else ''}"


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for mine in grouped(measured(rows), lambda case: (case.network, case.tolerance)):
        early = {
            constraint: first_third(profile(found))
            for constraint in (STEP, GLOBAL)
            if (found := measured(mine, constraint=constraint, unit=""))
        }
        if len(early) == 2:
            more, less = early[GLOBAL], early[STEP]
            said = f"{mine[0].case.network}: first layers lose {more:.2f} of what all do, by steps {less:.2f}"
            require(more >= less, said)


def first_third(shares: Sequence[float]) -> float:
    """The mean over the layers that are visited before the others, relative to that over all of them."""
    return fmean(shares[: max(1, len(shares) // 3)]) / max(fmean(shares), 1e-9)


EXPERIMENT = Experiment(
    "fig4",
    "Sparsity per layer with the step constraint and without",
    cases,
    partial(sparsity_table, what="constraint", label=constraint_of),
    partial(
        draw_profiles,
        panel_of=lambda case: (case.network, case.tolerance),
        label=constraint_of,
        title=lambda case: f"{case.network}, tolerance {case.tolerance:g}",
    ),
    check,
)
