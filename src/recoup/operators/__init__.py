"""The operator table: all that is known of an ATen operation, one record each, one file per family.

Importing this package fills the table; `recoup.operators.record` looks operators up.
"""

from recoup.operators import (
    checks,
    convolution,
    experts,
    indexing,
    linear,
    movement,
    norm,
    pairing,
    pointwise,
    pooling,
    recurrent,
    reduction,
    spreading,
)

__all__ = [
    "checks", "convolution", "experts", "indexing", "linear", "movement", "norm", "pairing", "pointwise", "pooling",
    "recurrent", "reduction", "spreading",
]  # fmt: skip
