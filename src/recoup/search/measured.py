"""Measured allocation on a network: the harm each group does, and the widths for a share of the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from recoup.algebra.selection import Ranking
from recoup.calibrate import Calibration
from recoup.errors import BudgetError, UsageError
from recoup.judging.harm import Reference
from recoup.progress import Progress, silent
from recoup.recover import Compensator
from recoup.search.allocation import Harm, allocate, harm_of
from recoup.search.budget import widths_for
from recoup.search.widths import Widths
from recoup.settings import Budget
from recoup.structure.groups import Group
from recoup.structure.terms import Terms, Timing, latency_terms, macs_terms, parameter_terms

# The shares of a group's channels that are kept when its harm is measured. Harm grows evenly while errors are small and
# much faster when the network falls apart: one measurement cannot tell where that begins.
LEVELS = (0.75, 0.25)
# A cost is a sum of products in floating point.
ROUNDING = 1e-9
# Why something is left when everything is cut, where it is not only what is locked.
_REST = {"latency": "the rest is locked, or its time does not depend on widths"}


@dataclass(frozen=True, slots=True, eq=False)
class Allocator:
    """Knows what every width of every group would do and cost, and so the mask for every share of the cost."""

    widths: Widths
    harms: Mapping[str, Harm]
    terms: Terms

    @property
    def whole(self) -> float:
        """The cost of the network as it is."""
        return self.terms.total({name: len(harm.curve) - 1 for name, harm in self.harms.items()})

    @property
    def least(self) -> float:
        """The smallest share of the cost that can be reached."""
        return self.terms.total({name: harm.least for name, harm in self.harms.items()}) / self.whole

    def keep(self, share: float) -> Tensor:
        """The mask that costs at most `share` and does the least harm."""
        target = share
        for _ in range(20):  # widths are rounded up to multiples, and layers that would be empty get a channel back
            counts = allocate(self.harms, self.terms, target * self.whole)
            mask = self._mask(counts)
            reached = self.share(mask)
            if reached <= share or target <= self.least:
                break
            target *= share / reached
        return mask

    def _mask(self, counts: Mapping[str, int]) -> Tensor:
        structure = self.widths.structure
        keep = structure.keep_all()
        for name, count in counts.items():
            keep = self.widths.cut(structure.group(name), count, keep)
        return keep

    def counts(self, mask: Tensor) -> dict[str, int]:
        """How many channels of every group a mask keeps."""
        structure = self.widths.structure
        return {name: int(mask[structure.group(name).channels].sum()) for name in self.harms}

    def share(self, mask: Tensor) -> float:
        """What a mask costs: like the best channels of every group, as many as it keeps."""
        return self.terms.total(self.counts(mask)) / self.whole


def allocator(
    model: nn.Module,
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    reference: Reference,
    of: str = "macs",
    progress: Progress = silent,
    *,
    timings: Mapping[str, Timing] | None = None,
    levels: Sequence[float] = LEVELS,
) -> Allocator:
    """Measure the harm of every prunable group: runs of the network with that group alone cut and compensated.

    It is cut to these `levels`. A cost in seconds, of "latency", needs the `timings` of the network's operations.
    """
    structure = calibration.structure
    widths = widths_for(calibration, rankings)
    compensator = Compensator(calibration)
    harms = {}
    for number, group in enumerate(structure.prunable, start=1):
        harms[group.name] = _harm(group, rankings[group.name], widths, compensator, reference, levels)
        progress("measure groups", number, len(structure.prunable))
    orders = {group.name: widths.order(group) for group in structure.prunable}
    return Allocator(widths, harms, _terms_of(of, model, calibration, orders, timings))


def _terms_of(
    of: str,
    model: nn.Module,
    calibration: Calibration,
    orders: Mapping[str, Tensor],
    timings: Mapping[str, Timing] | None,
) -> Terms:
    structure, traced = calibration.structure, calibration.traced
    if of == "latency":
        if timings is None:
            raise UsageError("widths for a latency need timings: pass recoup.timing.operation_timings(...).")
        return latency_terms(structure, orders, timings, traced.standalone.layouts)
    return macs_terms(structure, orders) if of == "macs" else parameter_terms(structure, orders, traced.host(model))


def _harm(
    group: Group,
    ranking: Ranking,
    widths: Widths,
    compensator: Compensator,
    reference: Reference,
    levels: Sequence[float],
) -> Harm:
    if ranking.loss is None:
        raise UsageError(
            f"{group.name}: measured allocation needs a selector that knows the loss at every width, such as "
            "'backward'. Choose one of those, or Settings(search='binary')."
        )
    staying = group.width - group.free
    measured = {}
    for level in levels:
        count = staying + max(0 if staying else 1, round(level * group.free))
        keep = widths.cut(group, count, widths.structure.keep_all())
        measured[int(keep[group.channels].sum())] = reference.harm(compensator.weights(keep))
    return harm_of(ranking.loss, measured, max(1, staying))


def keep_within(allocation: Allocator, budget: Budget) -> Tensor:
    """The mask for a budget.

    Raises:
        BudgetError: even one channel per group costs more than the budget allows.
    """
    if budget.share < allocation.least:
        raise BudgetError(
            f"keeping {budget.share:.1%} of the {budget.of} is out of reach: with every prunable group cut to its last "
            f"channel {allocation.least:.1%} remain, because {_REST.get(budget.of, 'the rest is locked')}. "
            "`recoup.inspect` lists what is locked and why."
        )
    keep = allocation.keep(budget.share)
    if allocation.share(keep) > budget.share * (1 + ROUNDING):
        raise BudgetError(
            f"keeping {budget.share:.1%} of the {budget.of} is out of reach: with widths as they have to be "
            f"{allocation.share(keep):.1%} remain. Allow more, or smaller multiples."
        )
    return keep
