"""The op table: for every ATen operation, how labels pass through it. One file per family."""

from recoup.structure.rules import contraction, movement, norm, pointwise, reduction, window
from recoup.structure.rules.table import Call, find_rule, known_operations

__all__ = [
    "Call",
    "contraction",
    "find_rule",
    "known_operations",
    "movement",
    "norm",
    "pointwise",
    "reduction",
    "window",
]
