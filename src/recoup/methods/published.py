"""Widths as published: the functions of `Paper` and `Released`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, get_args

from recoup.algebra.selection import Ranking, find_selector
from recoup.allocation.binary import (
    NOTHING_LEFT,
    BinarySettings,
    Constraint,
    Order,
    Unit,
    bisections,
    spared_groups,
)
from recoup.allocation.goal import Allocation, Goal, Proposal, Search
from recoup.allocation.tolerance import search_within
from recoup.allocation.uniform import keep_uniformly
from recoup.allocation.widths import widths_for
from recoup.config import Method, require_common, require_flag, require_one_of, require_whole
from recoup.errors import CalibrationError, LockedError, UsageError
from recoup.judge.acceptance import Acceptance
from recoup.judge.accuracy import NO_LABELS
from recoup.methods.measured import limits_of
from recoup.progress import Progress
from recoup.recovery.choose import Recovered
from recoup.recovery.registry import ONE_PASS_FAMILY, find_recovery, recover_by_name
from recoup.statistics.calibrate import Calibration


class PublishedMethod(Method, BinarySettings, Protocol):
    """A method with the paper's search, and a recovery of the one-pass family by name."""

    @property
    def recovery(self) -> str: ...  # noqa: D102 - described above


def check_published(method: PublishedMethod) -> None:
    """Refuse fields that make no sense."""
    find_selector(method.selector)
    require_common(method)
    require_whole("steps", method.steps)
    require_flag("classifier", method.classifier)
    require_one_of("constraint", method.constraint, get_args(Constraint))
    require_one_of("order", method.order, get_args(Order))
    require_one_of("unit", method.unit, get_args(Unit))
    find_recovery(method.recovery)
    if method.recovery not in ONE_PASS_FAMILY:
        raise UsageError(
            f"recovery {method.recovery!r} refits layers in the pruned network, which {type(method).__name__} does "
            f"not. It has {', '.join(ONE_PASS_FAMILY)}; calibrate with Best() or Fast() for the others."
        )


def allocate_as_published(
    method: PublishedMethod,
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    goal: Goal,
    acceptance: Acceptance | None,
    progress: Progress,
) -> Allocation:
    """The same share of every group for a budget, a binary search layer by layer for a tolerance."""
    spared = spared_groups(calibration.traced, method)
    widths = replace(widths_for(calibration, rankings, limits_of(calibration, goal)), spared=spared)
    if not widths.groups and not (goal.budget is not None and goal.budget.share == 1):
        raise LockedError(NOTHING_LEFT)
    if goal.budget is not None:
        return Allocation(keep_uniformly(calibration, widths, goal.budget))
    if goal.tolerance is None:
        return Allocation(widths.start())
    assert acceptance is not None
    if acceptance.what == "agreement":
        raise CalibrationError(NO_LABELS)

    def recover(proposal: Proposal) -> Recovered:
        return recover_by_name(method.recovery, calibration, proposal.keep)

    strategy = bisections(calibration.traced, widths, method, goal.tolerance, progress)
    start = Search(widths.start(), acceptance, goal.tolerance)
    found = search_within(calibration, strategy, recover, start)
    return Allocation(found.keep, found)


def recover_as_published(
    method: PublishedMethod,
    calibration: Calibration,
    allocation: Allocation,
    progress: Progress,
) -> Recovered:
    """As the method's recovery does, unless the search has done that."""
    if allocation.recovered is not None:
        return allocation.recovered
    return recover_by_name(method.recovery, calibration, allocation.keep, progress)
