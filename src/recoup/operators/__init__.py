"""The operator table: all that is known of an ATen operation, one record each, one file per family.

Importing this package fills the table; `recoup.operators.record` looks operators up.
"""

from recoup.operators import (
    checks,
    convolution,
    indexing,
    linear,
    movement,
    norm,
    pairing,
    pointwise,
    pooling,
    reduction,
    spreading,
)

__all__ = [
    "checks", "convolution", "indexing", "linear", "movement", "norm", "pairing", "pointwise", "pooling", "reduction",
    "spreading",
]  # fmt: skip
