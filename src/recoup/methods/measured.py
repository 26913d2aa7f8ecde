"""Widths by measured output error, and recoveries that held-out images choose from: the functions of `Best`, `Fast`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

from torch import Tensor

from recoup.algebra.selection import Ranking, find_selector
from recoup.allocation import timing
from recoup.allocation.goal import Allocation, Goal, Proposal, Search
from recoup.allocation.latency import Latency, keep_within_time
from recoup.allocation.measured import Allocator, cost_model, keep_within, measure_errors
from recoup.allocation.rounds import keep_in_rounds
from recoup.allocation.shares import full_shares, quick_shares
from recoup.allocation.tolerance import search_within
from recoup.allocation.uniform import keep_uniformly
from recoup.allocation.widths import Widths, widths_for
from recoup.channels.cost_model import CostModel
from recoup.channels.patterns import widths_by_group
from recoup.config import Budget, Limits, Outputs, SequentialMethod, is_number, require_common, require_one_of
from recoup.errors import UsageError, warn
from recoup.judge.acceptance import Acceptance, judged
from recoup.progress import Progress
from recoup.recovery.choose import Recovered, recover_in_full, recover_quickly, reference_of, refined
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.statistics.calibrate import Calibration
from recoup.surgery.apply import apply

# Held-out images by which groups are measured on the way to a tolerance, where time counts and every candidate is
# judged on images of its own.
ENOUGH_IMAGES = 2000


def check_measured(method: SequentialMethod) -> None:
    """Refuse fields that make no sense."""
    find_selector(method.selector)
    require_common(method)
    require_one_of("outputs", method.outputs, get_args(Outputs))
    confidence, refine = method.confidence, method.refine
    if confidence is not None and not (is_number(confidence) and 0.5 <= confidence < 1):
        raise UsageError(f"confidence must be None or lie from 0.5 to below 1, got {method.confidence}.")
    if not is_number(refine) or not 0 <= refine < math.inf:
        raise UsageError(f"refine must be a number of seconds, 0 or more, got {method.refine}.")


def limits_of(calibration: Calibration, goal: Goal) -> Limits:
    """How many channels groups may keep, by the names of the groups."""
    return Limits(widths_by_group(calibration.structure, goal.widths), goal.min_width)


def allocate_by_error(
    method: SequentialMethod,
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    goal: Goal,
    acceptance: Acceptance | None,
    progress: Progress,
) -> Allocation:
    """The widths that cost least for the output error they cause, as few as the goal allows."""
    widths = widths_for(calibration, rankings, limits_of(calibration, goal))
    budget, reference = goal.budget, reference_of(calibration)
    if goal.tolerance is not None:
        assert acceptance is not None
        curves = measure_errors(calibration, rankings, widths, reference.part(ENOUGH_IMAGES), progress)
        allocator = Allocator(widths.without_constants(), curves, cost_model(calibration, widths))
        start = Search(widths.start(), acceptance, goal.tolerance)
        found = _search(method, calibration, allocator, start, progress)
        return Allocation(found.keep, found)
    if budget is None:
        return Allocation(widths.start())
    if budget.of == "width":
        return Allocation(keep_uniformly(calibration, widths, budget))
    curves = measure_errors(calibration, rankings, widths, reference, progress)
    if budget.of == "latency":
        return _within_time(calibration, Allocator(widths, curves, _seconds(calibration, widths)), budget, progress)
    allocator = Allocator(widths, curves, cost_model(calibration, widths, budget.of))
    return Allocation(_in_rounds(method, calibration, allocator, budget, progress))


def recover_and_choose(
    method: SequentialMethod, calibration: Calibration, allocation: Allocation, progress: Progress
) -> Recovered:
    """The recovery that errs least on held-out images; refinement is left out where it breaks the tolerance."""
    keep = allocation.keep
    recovered = allocation.recovered or recover_in_full(calibration, keep, progress)
    if not method.refine or not recovered.plan.weights:
        return recovered
    after = refined(calibration, recovered, keep, progress)
    if after.plan is recovered.plan or _is_within_tolerance(calibration, allocation.search, after):
        return after
    warn("refinement is left out: the refined network loses more than the tolerance on the validation images.")
    return recovered


def _is_within_tolerance(calibration: Calibration, search: Search | None, recovered: Recovered) -> bool:
    if search is None:
        return True
    return judged(search.acceptance, apply(calibration.model, recovered.plan)).bound < search.tolerance


def _search(
    method: SequentialMethod, calibration: Calibration, allocator: Allocator, start: Search, progress: Progress
) -> Search:
    """Quick recoveries find about which share can go; where layers are refitted jointly, full ones go further."""
    propose = full_shares if method.joint_steps else quick_shares

    def recover(proposal: Proposal) -> Recovered:
        if proposal.in_full:
            return recover_in_full(calibration, proposal.keep, progress)
        return recover_quickly(calibration, proposal.keep)

    return search_within(calibration, propose(allocator, start.tolerance, progress), recover, start)


def _in_rounds(
    method: SequentialMethod, calibration: Calibration, allocator: Allocator, budget: Budget, progress: Progress
) -> Tensor:
    return keep_in_rounds(
        allocator,
        lambda current: keep_within(current, budget),
        lambda keep: recover_quickly(calibration, keep),
        method.rounds,
        progress,
    )


def _seconds(calibration: Calibration, widths: Widths) -> CostModel:
    traced, first = calibration.traced, calibration.split.first
    timings = timing.operation_timings(traced.standalone.host, traced.structure, first)
    return cost_model(calibration, widths, "latency", timings)


def _within_time(calibration: Calibration, allocator: Allocator, budget: Budget, progress: Progress) -> Allocation:
    """The mask for a budget of time; smaller networks are timed with the weights of one-pass recovery."""
    model, first = calibration.model, calibration.split.first

    def measure(keep: Tensor) -> Latency:
        if bool(keep.all()):
            (before,) = timing.network_seconds([model], first)
            return Latency(before, before, budget.share)
        smaller = apply(model, recover_in_one_pass(calibration, keep))
        before, after = timing.network_seconds([model, smaller], first)
        return Latency(before, after, budget.share)

    timed = keep_within_time(allocator, budget, measure, progress)
    return Allocation(timed.keep, latency=timed.latency)
