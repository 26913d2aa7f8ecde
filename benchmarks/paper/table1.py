"""Table I: ResNet-50 at four tolerances, every residual block one step of the search, beside the paper and its rivals.

Varies the method (the paper's, `Best`) and the tolerance. ResNet-50 in its form for CIFAR-10, and on ImageNet for
whoever has the images and the weights. The paper's figures are those of ImageNet.

Asserts: no search exceeds its tolerance; a larger tolerance removes more; the paper's search makes three measurements
per block, and never more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.paper.cases import BEST, PAPER, Case, Row, measured
from benchmarks.paper.checks import require, require_more_for_more, require_within_tolerance
from benchmarks.paper.comparison import comparison_cases, comparison_table, draw_comparison
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.published import RESNET50, RESNET50_EVALUATIONS, RESNET50_RIVALS

TOLERANCES = tuple(figure.tolerance for figure in RESNET50)
STEPS = 3


def cases(options: Options) -> list[Case]:
    tolerances = (2.0, 8.0) if options.smoke else TOLERANCES
    return comparison_cases(("resnet50", "resnet50-imagenet"), (PAPER, BEST), tolerances, 1, options)


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for method in (PAPER, BEST):
        require_more_for_more(rows, method=method)
    for row in measured(rows, method=PAPER):
        made = row.outcome.evaluations or 0
        # One more where channels that are constant are tried first.
        require(made % STEPS <= 1, f"{row.case}: {made} measurements are not {STEPS} per block")
        require(made <= RESNET50_EVALUATIONS + 1, f"{row.case}: {made} measurements, the paper has 48")


EXPERIMENT = Experiment(
    "table1",
    "ResNet-50: points lost over FLOPs removed",
    cases,
    partial(comparison_table, published=RESNET50, rivals=RESNET50_RIVALS),
    partial(draw_comparison, published=RESNET50, rivals=RESNET50_RIVALS),
    check,
)
