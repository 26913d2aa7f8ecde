"""The op table: for every ATen operation, how labels pass through it. One file per family."""

from recoup.structure.rules import contraction, movement, norm, pairing, pointwise, reduction, spreading, window
from recoup.structure.rules.movement import MOVES
from recoup.structure.rules.table import Call, find_rule, is_pointwise, unknown

__all__ = [
    "MOVES",
    "Call",
    "contraction",
    "find_rule",
    "is_pointwise",
    "movement",
    "norm",
    "pairing",
    "pointwise",
    "reduction",
    "spreading",
    "unknown",
    "window",
]
