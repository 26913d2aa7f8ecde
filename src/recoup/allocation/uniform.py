"""Plain budgets: the largest common share of every group's width that costs no more than allowed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import Tensor

from recoup.allocation.series import members_of
from recoup.allocation.widths import Widths
from recoup.channels.cost import Cost, cost
from recoup.config import Budget
from recoup.errors import BudgetError, UsageError
from recoup.statistics.calibrate import Calibration

# Halvings of the interval of shares: finer than one channel in the widest layer there is.
BISECTIONS = 20
NOT_TIMED = "a latency budget needs widths that are measured: use method='best' or 'fast'."


def keep_uniformly(calibration: Calibration, widths: Widths, budget: Budget) -> Tensor:
    """The mask over all channels that meets `budget` with the same share of every prunable group.

    Shares are whole channels: the first groups get one step more than the last ones, as far as the budget goes.

    Raises:
        BudgetError: even one channel per group costs more than the budget allows.
        UsageError: the budget is of time, for which widths are measured.
    """
    if budget.of == "latency":
        raise UsageError(NOT_TIMED)
    structure, model = calibration.structure, calibration.traced.host

    def keep(share: float) -> Tensor:
        return widths.keep(widths.groups, share, widths.start())

    if budget.of == "width":
        return keep(budget.share)
    allowed = budget.share * _amount(cost(structure, model), budget)

    def fits(mask: Tensor) -> bool:
        return _amount(cost(structure, model, mask), budget) <= allowed

    if fits(keep(1.0)):
        return keep(1.0)
    if not fits(keep(0.0)):
        least = _amount(cost(structure, model, keep(0.0)), budget) / _amount(cost(structure, model), budget)
        raise BudgetError(
            f"keeping {budget.share:.1%} of the {budget.of} is out of reach: with every prunable group cut as far as "
            f"it may be {least:.1%} remain, because {widths.rest}. `recoup.inspect` lists what is locked and why."
        )
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(keep(middle)) else (low, middle)

    groups = {group.name: group for group in widths.groups}
    bundles = [[groups[name] for name in names if name in groups] for names in members_of(structure).values()]

    def widened(count: int) -> Tensor:
        return widths.keep(chain(*bundles[:count]), high, keep(low))

    return widened(_most(len(bundles), lambda count: fits(widened(count))))


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, given that 0 does and that fitting ends somewhere."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _amount(what: Cost, budget: Budget) -> int:
    return what.macs if budget.of == "macs" else what.parameters
