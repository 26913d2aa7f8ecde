"""Budgets of time: widths by a model of the seconds, and whole networks timed to see what it is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.allocation.measured import Allocator, keep_within
from recoup.config import Budget
from recoup.progress import Progress, silent

# How often another share of the modelled seconds is tried where the first one missed.
RETRIES = 3
# A network that leaves less than this share of the budget unused will do.
NEAR = 0.05


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one batch in the original and in the smaller network, and the share that was asked for."""

    before: float
    after: float
    asked: float

    @property
    def share(self) -> float:
        """The share of the time that is left."""
        return self.after / self.before

    @property
    def is_met(self) -> bool:
        """Whether it is no more than was asked for."""
        return self.share <= self.asked


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A mask for the share `target` of the modelled seconds, and the time that its network takes."""

    target: float
    keep: Tensor
    latency: Latency


def keep_within_time(
    allocation: Allocator, budget: Budget, measure: Callable[[Tensor], Latency], progress: Progress = silent
) -> Timed:
    """The widest of the masks that were tried whose network, as `measure` finds it, is within the budget.

    Where none is, the mask of the fastest: `latency.is_met` tells.

    Raises:
        BudgetError: even one channel per group is modelled to take longer than the budget allows.
    """
    target, keep = budget.share, keep_within(allocation, budget)
    tried: list[Timed] = []
    while not any(torch.equal(keep, known.keep) for known in tried):
        tried.append(Timed(target, keep, measure(keep)))
        progress("time networks", len(tried), 1 + RETRIES)
        if len(tried) > RETRIES or (1 - NEAR) * budget.share <= tried[-1].latency.share <= budget.share:
            break
        target = _next_target(tried, allocation.least)
        keep = allocation.keep(target)
    met = [known for known in tried if known.latency.is_met]
    if met:
        return max(met, key=lambda known: known.target)
    return min(tried, key=lambda known: known.latency.share)


def _next_target(tried: Sequence[Timed], least: float) -> float:
    """Where the time would lie just within the budget if it grew evenly between the nearest on both sides of it.

    As long as there is only one side, in proportion; neither below the share that can be reached nor above all.
    """
    last = tried[-1]
    aim = (1 - NEAR / 2) * last.latency.asked
    met = [known for known in tried if known.latency.is_met]
    missed = [known for known in tried if not known.latency.is_met]
    if not met or not missed:
        return min(max(last.target * aim / last.latency.share, least), 1.0)
    low, high = max(met, key=lambda known: known.target), min(missed, key=lambda known: known.target)
    position = (aim - low.latency.share) / (high.latency.share - low.latency.share)
    return low.target + (high.target - low.target) * min(max(position, 0.15), 0.85)
