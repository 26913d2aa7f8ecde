"""Which channels to keep: every selector ranks the channels of one group, most valuable first."""

from recoup.algebra.selection.evidence import Evidence, Flow, SingleMaps
from recoup.algebra.selection.greedy import backward, forward, loss_along
from recoup.algebra.selection.magnitude import l1, l2, random
from recoup.algebra.selection.problem import Layer, Problem, Ranking, Selector
from recoup.algebra.selection.registry import SELECTORS, ask, find_selector, looks_at_images

__all__ = [
    "SELECTORS",
    "Evidence",
    "Flow",
    "Layer",
    "Problem",
    "Ranking",
    "Selector",
    "SingleMaps",
    "ask",
    "backward",
    "find_selector",
    "forward",
    "l1",
    "l2",
    "looks_at_images",
    "loss_along",
    "random",
]
