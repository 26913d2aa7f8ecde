"""Methods by name, what measures for them, and the two stages that are a method's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from recoup.algebra.selection import Ranking
from recoup.allocation.goal import Allocation, Goal
from recoup.allocation.uniform import NOT_TIMED
from recoup.config import Method, SequentialMethod, require_method, require_progress
from recoup.errors import (
    CalibrationError,
    CaptureError,
    InputError,
    UsageError,
    require_kind,
    shown,
    unknown_name,
    warn,
)
from recoup.graph.standalone import entering
from recoup.inputs.split import Split
from recoup.inputs.surroundings import undisturbed
from recoup.judge.acceptance import Acceptance, ImageAcceptance, ScoreAcceptance
from recoup.judge.accuracy import checked
from recoup.methods.best import Best, Fast
from recoup.methods.paper import Paper, Released
from recoup.progress import Progress, silent
from recoup.recovery.choose import Recovered
from recoup.recovery.plans import keep_mask
from recoup.recovery.registry import recover_by_name
from recoup.statistics.calibrate import Calibration
from recoup.tracing.trace import Traced

METHODS: Mapping[str, Callable[[], Method]] = MappingProxyType(
    {"best": Best, "fast": Fast, "paper": Paper, "released": Released}
)
# The confidence at which the bound of a drop is the drop itself.
EVEN_ODDS = 0.5
NOTHING_TO_MEASURE = (
    "a tolerance needs something to measure: pass validation=batches of (inputs, labels), or evaluate=fn. "
    "Without labels ask for a budget, or use method='best', which can measure agreement with the original."
)


def find_method(method: str | Method) -> Method:
    """The method of that name with its defaults, or the value itself."""
    if not isinstance(method, str):
        require_method(method)
        return method
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    return METHODS[method]()


@undisturbed
def allocate(
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    goal: Goal,
    acceptance: Acceptance | None = None,
    progress: Progress = silent,
) -> Allocation:
    """How many channels every group keeps, as the calibration's method decides.

    The `acceptance` measures candidates for a tolerance; it is made from the goal if not given.

    Raises:
        BudgetError: the budget is out of reach.
    """
    require_kind("calibration", calibration, Calibration, "what recoup.calibrate returns")
    require_kind("goal", goal, Goal, "a recoup.Goal, such as recoup.Goal(budget=recoup.Budget(macs=0.5))")
    require_progress(progress)
    _require_rankings(calibration, rankings)
    method = calibration.method
    if acceptance is not None and not (callable(acceptance) and hasattr(acceptance, "require_enough")):
        raise UsageError(
            f"acceptance must measure candidates, as recoup makes it from a goal, got {shown(acceptance)}."
        )
    if acceptance is None:
        acceptance = acceptance_for(calibration.model, goal, method, calibration.split)
    allocation: Allocation = method.allocate(calibration, rankings, goal, acceptance, progress)
    return allocation


@undisturbed
def recover(
    calibration: Calibration,
    allocation: Allocation | Tensor | Mapping[str, Tensor],
    progress: Progress = silent,
    recovery: str | None = None,
) -> Recovered:
    """The plan that refits what is left, as the calibration's method does, or by the recovery of that name.

    In the place of an allocation, a mask over all channels will do, or masks by group (groups not named stay whole).
    Recoveries are none, mean-shift, batch-norm, one-pass, rescale; with a calibration of `Best` or `Fast` also
    in-sequence, joint, refined.
    """
    require_kind("calibration", calibration, Calibration, "what recoup.calibrate returns")
    require_progress(progress)
    masks = "what recoup.allocate returns, a mask over all channels, or masks by group"
    require_kind("allocation", allocation, (Allocation, Tensor, Mapping), masks)
    if not isinstance(allocation, Allocation):
        allocation = Allocation(keep_mask(calibration.structure, allocation))
    if recovery is not None:
        return recover_by_name(recovery, calibration, allocation.keep, progress)
    recovered: Recovered = calibration.method.recover(calibration, allocation, progress)
    return recovered


def _require_rankings(calibration: Calibration, rankings: Mapping[str, Ranking]) -> None:
    require_kind("rankings", rankings, Mapping, "what recoup.rank returns")
    for group in calibration.structure.prunable:
        require_kind(f"the ranking of {group.name}", rankings.get(group.name), Ranking, "a recoup.Ranking")
        if len(rankings[group.name].order) != group.width:
            raise UsageError(
                f"the ranking of {group.name} has {len(rankings[group.name].order)} channels, not {group.width}."
            )


def acceptance_for(model: nn.Module, goal: Goal, method: Method, split: Split) -> Acceptance | None:
    """What compares candidates with the model; None where nothing is to be compared.

    The model is measured here, so that what cannot be measured is known before the work. Without validation images or
    a measure, a tolerance is asked of agreement with the original on held-out images.

    Raises:
        CalibrationError: there are too few images to vouch for the tolerance, or they cannot be measured on.
    """
    acceptance = _acceptance(model, goal, method, split)
    if acceptance is not None and goal.tolerance is not None:
        acceptance.require_enough(goal.tolerance)
    return acceptance


def _acceptance(model: nn.Module, goal: Goal, method: Method, split: Split) -> Acceptance | None:
    confidence = method.confidence or EVEN_ODDS
    if goal.evaluate is not None:
        return ScoreAcceptance(model, checked(goal.evaluate))
    if goal.validation is not None:
        return ImageAcceptance(model, goal.validation, confidence)
    if goal.tolerance is None:
        return None
    if not split.held:
        raise UsageError(NOTHING_TO_MEASURE)
    return ImageAcceptance(model, [split.batches[place] for place in split.held], confidence)


def require_possible(goal: Goal, method: Method) -> None:
    """Refuse a goal that a method cannot reach, before any work is done for it."""
    if isinstance(method, SequentialMethod):
        return
    if goal.budget is not None and goal.budget.of == "latency":
        raise UsageError(NOT_TIMED)
    if goal.tolerance is not None and goal.validation is None and goal.evaluate is None:
        raise UsageError(NOTHING_TO_MEASURE)


def runnable(method: Method, traced: Traced, goal: Goal) -> Method:
    """The method itself, or the paper's where the model cannot be run operation by operation; a warning says so."""
    if not isinstance(method, SequentialMethod):
        return method
    try:
        traced.standalone.host  # noqa: B018  # made here, to know that it can be
        _require_stateless(traced)
    except CaptureError as error:
        if goal.budget is not None and goal.budget.of == "latency":
            raise UsageError(
                f"a latency budget needs to time single operations, which this model does not allow: {error} Otherwise "
                "ask for a share of the MACs."
            ) from error
        if goal.tolerance is not None and goal.validation is None and goal.evaluate is None:
            raise UsageError(
                "without validation images a tolerance needs to run the model operation by operation, which it does "
                f"not allow: {error} Pass validation= or evaluate=."
            ) from error
        warn(
            "the paper's method is used: widths are not measured, layers are refitted in one pass, nothing is refined, "
            f"and a tolerance is asked only of the validation images themselves: {error}"
        )
        return Paper(
            selector=method.selector,
            weighting=method.weighting,
            ridge=method.ridge,
            positions=method.positions,
            multiple_of=method.multiple_of,
            seed=method.seed,
            unit="layer",  # nothing was to be left whole
            classifier=True,
        )
    return method


def _require_stateless(traced: Traced) -> None:
    if traced.state:
        raise CaptureError(
            f"its forward pass writes into {', '.join(traced.state[:3])}, so what it computes depends on what it ran "
            "before."
        )


def require_served(method: Method, traced: Traced, split: Split) -> None:
    """Refuse batches that the captured network does not serve, where the method runs it operation by operation.

    And batches that can be read only once, where it reads them a second time.
    """
    if getattr(method, "recovery", None) == "batch-norm" and split.stream is not None:
        split.stream.require_repeatable()
    if not isinstance(method, SequentialMethod):
        return
    for number, batch in zip(split.numbers, split.batches, strict=True):
        try:
            entering(traced.standalone.host, batch.args, batch.kwargs)
        except InputError as error:  # noqa: PERF203  # the number of the batch is what the error is about
            raise CalibrationError(
                f"calibration batch {number} is of another form than the first one: {error} Give batches of one form, "
                "or use method='paper', which calls the model itself."
            ) from error
