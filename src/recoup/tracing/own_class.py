"""Own class first: whether a result of the model's own class will do, where that can hold only a part of all cuts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recoup.channels.cost import cost
from recoup.channels.patterns import widths_by_group
from recoup.channels.structure import Structure
from recoup.config import Budget
from recoup.errors import UsageError
from recoup.tracing.trace import Traced

# With all groups cut alike, those that the class can hold keep at least this part of the width that all would keep.
ENOUGH = 0.75
# The goal that stands for one that is no share of MACs or parameters.
HALF = Budget(macs=0.5)
# Widths that are tried: so many parts of the whole.
PARTS = 64


def class_is_enough(own: Traced, every: Traced, budget: Budget | None, widths: Mapping[str, int]) -> bool:
    """Whether what the class holds (`own`) need not be cut much deeper for the goal than all that could be cut."""
    if not own.structure.prunable or own.idle:
        return False
    try:
        widths_by_group(own.structure, widths)
    except UsageError:  # a group that the class cannot hold at that width
        return False
    goal = budget if budget is not None and budget.of in ("macs", "parameters") else HALF
    return _parts_kept(own, goal) >= ENOUGH * _parts_kept(every, goal) > 0


def _parts_kept(traced: Traced, budget: Budget) -> int:
    """The largest width of all groups alike that meets a budget, in parts; 0 if none does."""
    structure = traced.structure
    # A standalone form takes long to make, and its MACs are the same.
    model = traced.standalone.model if budget.of == "macs" else traced.host
    whole = getattr(cost(structure, model), budget.of)
    low, high = 0, PARTS
    while low < high:
        middle = (low + high + 1) // 2
        met = getattr(cost(structure, model, _cut_alike(structure, middle / PARTS)), budget.of) <= budget.share * whole
        low, high = (middle, high) if met else (low, middle - 1)
    return low


def _cut_alike(structure: Structure, width: float) -> Tensor:
    """The mask that keeps this share of every group, and what is locked."""
    keep = structure.keep_all()
    for group in structure.prunable:
        free = group.free_in_turn()
        gone = min(len(free), group.width - group.rounded(max(1, round(width * group.width))))
        keep[group.start + free[len(free) - gone :]] = False
    return structure.refill(keep, torch.arange(structure.width))
