"""The op table: for every ATen operation, how labels pass through it. One file per family."""

from recoup.structure.rules import contraction, movement, norm, pointwise, reduction, window
from recoup.structure.rules.table import Call, find_rule, unknown

__all__ = [
    "Call",
    "contraction",
    "find_rule",
    "movement",
    "norm",
    "pointwise",
    "reduction",
    "unknown",
    "window",
]
