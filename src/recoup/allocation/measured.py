"""Measured allocation on a network: the output error each group causes, and the widths for a share of the cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from recoup.algebra.selection import Ranking
from recoup.allocation.lagrangian import ErrorCurve, cheapest, error_curve
from recoup.allocation.series import Members, TiedCosts, members_of, spread, tied
from recoup.allocation.widths import Widths
from recoup.channels.cost_model import CostModel, Timing, latency_model, macs_model, parameter_model
from recoup.channels.structure import Group
from recoup.config import Budget
from recoup.errors import BudgetError, UsageError
from recoup.judge.output_error import Reference
from recoup.progress import Progress, silent
from recoup.recovery.one_pass import one_pass_weights
from recoup.statistics.calibrate import Calibration
from recoup.statistics.rank import loss_of

# The shares of a group's channels that are kept when its error is measured. The error grows evenly while it is small
# and much faster when the network falls apart: one measurement cannot tell where that begins.
LEVELS = (0.75, 0.25)
# Bytes of weights that wait to be measured together: runs of the network share the operations in front of them.
TOGETHER = 1 << 30
# A cost is a sum of products in floating point.
ROUNDING = 1e-9
# Why something is left when everything is cut, where it is not only what is locked.
_MORE = {"latency": ", or its time does not depend on widths"}


@dataclass(frozen=True, slots=True, eq=False)
class Allocator:
    """Knows what every width of every group would do and cost, and so the mask for every share of the cost."""

    widths: Widths
    curves: Mapping[str, ErrorCurve]
    costs: CostModel

    @property
    def whole(self) -> float:
        """The cost of the network as it is."""
        return self.costs.total({name: curve.width for name, curve in self.curves.items()})

    @property
    def least(self) -> float:
        """The smallest share of the cost that can be reached."""
        return self._tied_costs.total({name: c.least for name, c in self._tied(self.curves).items()}) / self.whole

    @property
    def most(self) -> float:
        """The largest share: all of it, unless widths are given by hand."""
        return self._tied_costs.total({name: c.most for name, c in self._tied(self.curves).items()}) / self.whole

    def keep(self, share: float) -> Tensor:
        """The mask that costs at most `share` and causes the least error.

        A group may seem to cause none because its channels were constant on too few samples to tell. It is not cut
        below the same share for that, unless the share is out of reach otherwise.
        """
        cautious = {name: self._cautious(name, curve, share) for name, curve in self.curves.items()}
        mask = self._cheapest(cautious, share)
        return mask if self.share(mask) <= share else self._cheapest(self.curves, share)

    def _cautious(self, name: str, curve: ErrorCurve, share: float) -> ErrorCurve:
        doubtful = self.widths.doubtful(self.widths.structure.group(name))
        least = min(doubtful, math.floor(share * curve.width), curve.most)
        return replace(curve, least=max(curve.least, least))

    def _cheapest(self, curves: Mapping[str, ErrorCurve], share: float) -> Tensor:
        target, costs, curves = share, self._tied_costs, self._tied(curves)
        least = costs.total({name: curve.least for name, curve in curves.items()}) / self.whole
        for _ in range(20):  # widths are rounded up to multiples, and layers that would be empty get a channel back
            counts = cheapest(curves, costs, target * self.whole)
            mask = self._mask(spread(counts, self._members))
            reached = self.share(mask)
            if reached <= share or target <= least:
                break
            target *= share / reached
        return mask

    @property
    def _members(self) -> Members:
        return members_of(self.widths.structure)

    @property
    def _tied_costs(self) -> TiedCosts:
        return TiedCosts(self.costs, self._members)

    def _tied(self, curves: Mapping[str, ErrorCurve]) -> dict[str, ErrorCurve]:
        return tied(curves, self._members)

    def _mask(self, counts: Mapping[str, int]) -> Tensor:
        structure = self.widths.structure
        keep = structure.keep_all()
        for name, count in counts.items():
            keep = self.widths.cut(structure.group(name), count, keep)
        return keep

    def counts(self, mask: Tensor) -> dict[str, int]:
        """How many channels of every group a mask keeps."""
        structure = self.widths.structure
        return {name: int(mask[structure.group(name).channels].sum()) for name in self.curves}

    def share(self, mask: Tensor) -> float:
        """What a mask costs: like the best channels of every group, as many as it keeps."""
        return self.costs.total(self.counts(mask)) / self.whole


def measure_errors(
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    widths: Widths,
    reference: Reference,
    progress: Progress = silent,
    *,
    levels: Sequence[float] = LEVELS,
) -> dict[str, ErrorCurve]:
    """The error curve of every prunable group: runs of the network with that group alone cut and compensated.

    It is cut to these `levels`. Runs begin where the group is: what comes before is that of the whole network.
    """
    groups = calibration.structure.prunable
    measured: dict[str, dict[int, float]] = {group.name: {} for group in groups}
    done = 0
    for cuts in _together(_cuts(calibration, widths, levels)):
        count = len({cut.group for cut in cuts})
        tell = partial(_tell, progress, done, count, len(groups))
        for cut, error in zip(cuts, reference.errors([cut.tensors for cut in cuts], tell), strict=True):
            measured[cut.group][cut.count] = error
        done += count
    return {
        group.name: _curve(calibration, group, rankings[group.name], widths, measured[group.name]) for group in groups
    }


def _tell(progress: Progress, before: int, count: int, total: int, share: float) -> None:
    progress("measure groups", before + int(share * count), total)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A group cut alone to so many channels, and the tensors of the network that compensates for it."""

    group: str
    count: int
    tensors: Mapping[str, Tensor]


def _cuts(calibration: Calibration, widths: Widths, levels: Sequence[float]) -> Iterator[_Cut]:
    for group in calibration.structure.prunable:
        least, most = _bounds(group, widths)
        staying = group.width - group.free
        counts = [staying + max(0 if staying else 1, round(level * group.free)) for level in levels]
        for count in counts if least < most else [least]:
            keep = widths.cut(group, count, calibration.structure.keep_all())
            yield _Cut(group.name, int(keep[group.channels].sum()), one_pass_weights(calibration, keep))


def _together(cuts: Iterable[_Cut]) -> Iterator[list[_Cut]]:
    """All cuts of one group after the other, as many at a time as may be held."""
    for _, bundle in itertools.groupby(_numbered(cuts), key=lambda pair: pair[0]):
        yield [cut for _, cut in bundle]


def _numbered(cuts: Iterable[_Cut]) -> Iterator[tuple[int, _Cut]]:
    number = size = 0
    last = ""
    for cut in cuts:
        own = sum(tensor.numel() * tensor.element_size() for tensor in cut.tensors.values())
        if cut.group != last and size + own > TOGETHER:
            number, size = number + 1, 0
        size, last = size + own, cut.group
        yield number, cut


def _bounds(group: Group, widths: Widths) -> tuple[int, int]:
    return max(1, widths.least(group)), widths.limits.most(group.name, group.width)


def _curve(
    calibration: Calibration, group: Group, ranking: Ranking, widths: Widths, measured: Mapping[int, float]
) -> ErrorCurve:
    loss = loss_of(calibration, group, ranking, widths.order(group) - group.start)
    return error_curve(loss, measured, *_bounds(group, widths))


def cost_model(
    calibration: Calibration, widths: Widths, of: str = "macs", timings: Mapping[str, Timing] | None = None
) -> CostModel:
    """What widths cost: in MACs, in parameters, or in seconds, which needs the `timings` of operations."""
    structure, traced = calibration.structure, calibration.traced
    orders = {group.name: widths.order(group) for group in structure.prunable}
    if of == "latency":
        if timings is None:
            raise UsageError("widths for a latency need timings: pass those of recoup.allocation.timing.")
        return latency_model(structure, orders, timings, traced.standalone.layouts)
    return macs_model(structure, orders) if of == "macs" else parameter_model(structure, orders, traced.host)


def keep_within(allocator: Allocator, budget: Budget) -> Tensor:
    """The mask for a budget.

    Raises:
        BudgetError: even the fewest channels per group cost more than the budget allows.
    """
    if budget.share < allocator.least:
        raise BudgetError(
            f"keeping {budget.share:.1%} of the {budget.of} is out of reach: with every prunable group cut as far as "
            f"it may be {allocator.least:.1%} remain, because {allocator.widths.rest}{_MORE.get(budget.of, '')}. "
            "`recoup.inspect` lists what is locked and why."
        )
    keep = allocator.keep(budget.share)
    if allocator.share(keep) > budget.share * (1 + ROUNDING):
        raise BudgetError(
            f"keeping {budget.share:.1%} of the {budget.of} is out of reach: with widths as they have to be "
            f"{allocator.share(keep):.1%} remain. Allow more, or smaller multiples."
        )
    return keep
