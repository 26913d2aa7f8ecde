"""Which channels to keep: every selector ranks the channels of one group, most valuable first."""

from recoup.algebra.selection.greedy import backward, forward
from recoup.algebra.selection.magnitude import l2, random
from recoup.algebra.selection.problem import Layer, Problem, Ranking, Selector
from recoup.algebra.selection.registry import SELECTORS, ask, find_selector

__all__ = [
    "SELECTORS",
    "Layer",
    "Problem",
    "Ranking",
    "Selector",
    "ask",
    "backward",
    "find_selector",
    "forward",
    "l2",
    "random",
]
