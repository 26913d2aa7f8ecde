"""Table II: VGG-16 on CIFAR-10 at five tolerances, beside the paper's figures and the rivals it quotes.

Varies the method (the paper's, that of the released code, `Best`), the tolerance and the calibration sample.

Asserts: no search exceeds its tolerance; a larger tolerance removes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.paper.cases import BEST, PAPER, RELEASED, Case, Row
from benchmarks.paper.checks import require_more_for_more, require_within_tolerance
from benchmarks.paper.comparison import comparison_cases, comparison_table, draw_comparison
from benchmarks.paper.experiment import Experiment, Options
from benchmarks.paper.published import PUBLISHED, TOLERANCES, VGG16_RIVALS

METHODS = (PAPER, RELEASED, BEST)


def cases(options: Options) -> list[Case]:
    tolerances, seeds = ((1.0, 8.0), 1) if options.smoke else (TOLERANCES, 3)
    return comparison_cases(("vgg16",), METHODS, tolerances, seeds, options)


def check(rows: Sequence[Row]) -> None:
    require_within_tolerance(rows)
    for method in METHODS:
        require_more_for_more(rows, method=method)


EXPERIMENT = Experiment(
    "table2",
    "VGG-16: points lost over FLOPs removed",
    cases,
    partial(comparison_table, published=PUBLISHED, rivals=VGG16_RIVALS),
    partial(draw_comparison, published=PUBLISHED, rivals=VGG16_RIVALS),
    check,
)
