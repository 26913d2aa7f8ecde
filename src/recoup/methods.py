"""The stages of pruning in the two ways there are: as published, or measured and judged on held-out images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from torch import Tensor, nn

from recoup.algebra.selection import Ranking
from recoup.batches import Stream, inputs_of
from recoup.calibrate import Calibration, calibrate
from recoup.errors import CalibrationError, CaptureError, UsageError
from recoup.evaluate import NO_LABELS
from recoup.goal import Goal
from recoup.judging.harm import Reference
from recoup.judging.judge import ByImages, ByMeasure, Judge
from recoup.judging.sample import sample_of
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import Compensator
from recoup.report.content import Score
from recoup.search import (
    Allocator,
    Latency,
    Search,
    allocator,
    fit_budget,
    keep_in_rounds,
    keep_within,
    keep_within_time,
    search,
    search_in_full,
    search_share,
)
from recoup.settings import Budget
from recoup.structure.surgery import apply
from recoup.structure.trace import Traced
from recoup.timing import network_seconds, operation_timings
from recoup.variants import Chosen, Recoverer

# The confidence at which the bound of a drop is the drop itself.
EVEN_ODDS = 0.5
# Held-out images by which groups are measured on the way to a tolerance, where time counts and every candidate is
# judged on images of its own.
ENOUGH_IMAGES = 2000


class Published:
    """As the paper has it: all images in one pass, a binary search layer by layer, one-pass compensation."""

    latency = None

    def __init__(
        self, model: nn.Module, traced: Traced, batches: Stream, goal: Goal, judge: Judge | None, progress: Progress
    ) -> None:
        self._model, self._goal, self._judge, self._progress = model, goal, judge, progress
        if goal.tolerance is not None and judge is not None and judge.what == "agreement":
            raise CalibrationError(NO_LABELS)
        self.seen = calibrate(model, traced, batches, goal.settings, progress)

    def decide(self, rankings: Mapping[str, Ranking]) -> tuple[Tensor, Search | None]:
        """The mask over all channels, and the search that found it, if there was one."""
        return decide_as_published(self._model, self.seen, rankings, self._goal, self._progress)

    def recover(self, keep: Tensor) -> Chosen:
        """The plan that keeps `keep`."""
        return Chosen(Compensator(self.seen).plan(keep), {})

    def score(self, smaller: nn.Module, found: Search | None) -> Score | None:
        """What was measured of both models."""
        judge = self._judge
        if judge is None:
            return None
        if found is not None:
            return Score(found.base, found.base - found.drop, self._goal.tolerance, found.trials, judge.what)
        return Score(judge.base, judge(smaller).score, None, (), judge.what)


class Measured:
    """Beyond the paper: widths by what each group is worth, recovery in sequence, judged on held-out images."""

    def __init__(
        self, model: nn.Module, traced: Traced, batches: Stream, goal: Goal, judge: Judge | None, progress: Progress
    ) -> None:
        self._model, self._goal, self._given, self._progress = model, goal, judge, progress
        self._sample = sample_of(model, batches)
        if goal.tolerance is not None:
            self._judge.require_enough(goal.tolerance)
        sample, settings = self._sample, goal.settings
        fitting = [sample.batches[place] for place in sample.seen]
        numbers = [sample.numbers[place] for place in sample.seen]
        seen = calibrate(model, traced, fitting, settings, progress, numbers=numbers)
        self.seen = replace(seen, samples=sample.size)
        numbers = [sample.numbers[place] for place in sample.held]
        self._reference = Reference(traced.standalone.host, sample.judging(), settings.outputs, numbers)
        are_classes = settings.outputs == "classes" or (judge is not None and judge.what == "accuracy")
        self._recoverer = Recoverer(self.seen, self._sample, self._reference, are_classes=are_classes)
        self._chosen: Chosen | None = None
        self._first = inputs_of(batches.first, model)
        self.latency: Latency | None = None

    def decide(self, rankings: Mapping[str, Ranking]) -> tuple[Tensor, Search | None]:
        """The mask over all channels, and the search that found it, if there was one."""
        budget = self._goal.budget
        if self._goal.settings.search == "binary" or (budget is not None and budget.of == "width"):
            return decide_as_published(self._model, self.seen, rankings, self._goal, self._progress)
        if budget is not None and budget.of == "latency":
            return self._within_time(rankings, budget), None
        if budget is not None:
            allocation = allocator(self._model, self.seen, rankings, self._reference, budget.of, self._progress)
            return self._within(allocation, budget), None
        reference = self._reference.part(ENOUGH_IMAGES)
        found = self._search(allocator(self._model, self.seen, rankings, reference, "macs", self._progress))
        return found.keep, found

    def recover(self, keep: Tensor) -> Chosen:
        """The plan that keeps `keep`, the best variant of it."""
        chosen = self._chosen or self._recoverer.plan(keep, self._progress)
        if not self._goal.refine or not chosen.plan.weights:
            return chosen
        refined = self._recoverer.refined(chosen, keep, self._goal.refine, self._progress)
        if refined.plan is chosen.plan or self._is_within_tolerance(refined.plan):
            return refined
        warnings.warn(
            "refinement is left out: the refined network loses more than the tolerance on the validation images.",
            stacklevel=3,
        )
        return chosen

    def _is_within_tolerance(self, plan: Plan) -> bool:
        tolerance = self._goal.tolerance
        return tolerance is None or self._judge(apply(self._model, plan)).bound < tolerance

    def score(self, smaller: nn.Module, found: Search | None) -> Score | None:
        """What was measured of both models."""
        if found is not None and self._chosen is not None and not self._goal.refine:
            return Score(found.base, found.base - found.drop, self._goal.tolerance, found.trials, self._judge.what)
        if found is None and self._given is None:
            return None
        trials = () if found is None else found.trials
        return Score(self._judge.base, self._judge(smaller).score, self._goal.tolerance, trials, self._judge.what)

    def _within(self, allocation: Allocator, budget: Budget) -> Tensor:
        """The mask for a budget of MACs or parameters."""
        return keep_in_rounds(
            allocation,
            lambda current: keep_within(current, budget),
            lambda keep: self._recoverer.plan(keep, quick=True).harms,
            self._goal.settings.rounds,
            self._progress,
        )

    def _within_time(self, rankings: Mapping[str, Ranking], budget: Budget) -> Tensor:
        """The mask for a budget of time; smaller networks are timed with the weights of one-pass recovery."""
        model, traced, compensator = self._model, self.seen.traced, Compensator(self.seen)
        timings = operation_timings(traced.standalone.host, traced.structure, self._first)
        allocation = allocator(model, self.seen, rankings, self._reference, "latency", self._progress, timings=timings)

        def measure(keep: Tensor) -> Latency:
            if bool(keep.all()):
                (before,) = network_seconds([model], self._first)
                return Latency(before, before, budget.share)
            smaller = apply(model, compensator.plan(keep))
            before, after = network_seconds([model, smaller], self._first)
            return Latency(before, after, budget.share)

        timed = keep_within_time(allocation, budget, measure, self._progress)
        self.latency = timed.latency
        return timed.keep

    def _search(self, allocation: Allocator) -> Search:
        """Quick recoveries find about which share can go; where layers are refitted jointly, full ones go further."""
        tolerance, judge = self._goal.tolerance, self._judge
        assert tolerance is not None
        quick = _Candidates(self._model, self._recoverer, is_quick=True)
        if not self._goal.settings.joint:
            found = search_share(allocation, quick, judge, tolerance, self._progress)
            self._chosen = quick.chosen(found.keep)
            return found
        full = _Candidates(self._model, self._recoverer, is_quick=False, progress=self._progress)
        found, is_full = search_in_full(allocation, quick, full, judge, tolerance, self._progress)
        self._chosen = (full if is_full else quick).chosen(found.keep)
        return found

    @cached_property
    def _judge(self) -> Judge:
        """What the caller has given, otherwise agreement on held-out images."""
        held = [self._sample.batches[place] for place in self._sample.held]
        return self._given or ByImages(self._model, held, self._goal.settings.confidence or EVEN_ODDS)


class _Candidates:
    """Smaller networks for masks, and the plans they were made by."""

    def __init__(self, model: nn.Module, recoverer: Recoverer, is_quick: bool, progress: Progress = silent) -> None:
        self._model, self._recoverer, self._is_quick, self._progress = model, recoverer, is_quick, progress
        self._made: dict[bytes, Chosen] = {}

    def __call__(self, keep: Tensor) -> nn.Module:
        return apply(self._model, self._plan(keep).plan)

    def _plan(self, keep: Tensor) -> Chosen:
        place = keep.numpy().tobytes()
        if place not in self._made:
            self._made[place] = self._recoverer.plan(keep, self._progress, quick=self._is_quick)
        return self._made[place]

    def chosen(self, keep: Tensor) -> Chosen | None:
        return self._made.get(keep.numpy().tobytes())


def decide_as_published(
    model: nn.Module, seen: Calibration, rankings: Mapping[str, Ranking], goal: Goal, progress: Progress
) -> tuple[Tensor, Search | None]:
    """The same share of every group for a budget, a binary search layer by layer for a tolerance."""
    if goal.budget is not None:
        return fit_budget(model, seen, rankings, goal.budget), None
    assert goal.tolerance is not None and goal.measure is not None
    found = search(model, seen, rankings, goal.measure, goal.tolerance, progress)
    return found.keep, found


def judge_for(model: nn.Module, goal: Goal) -> Judge | None:
    """What compares candidates with the model, if the caller has said how.

    The model is measured here, so that what cannot be measured is known before the work.
    """
    if goal.evaluate is not None:
        assert goal.measure is not None
        return ByMeasure(model, goal.measure)
    if goal.validation is None:
        return None
    return ByImages(model, goal.validation, goal.settings.confidence or EVEN_ODDS)


def method_for(
    model: nn.Module, traced: Traced, batches: Stream, goal: Goal, judge: Judge | None, progress: Progress
) -> Published | Measured:
    """The way of pruning that the settings ask for, or the published one where the graph does not serve every batch."""
    settings = goal.settings
    if settings.search == "binary" and settings.recovery == "once" and not goal.refine:
        return Published(model, traced, batches, goal, judge, progress)
    try:
        traced.standalone.host  # noqa: B018  # made here, to know that it can be
    except CaptureError as error:
        if goal.budget is not None and goal.budget.of == "latency":
            raise UsageError(
                f"a latency budget needs to time single operations, which this model does not allow: {error} Otherwise "
                "ask for a share of the MACs."
            ) from error
        warnings.warn(
            "widths are not measured, layers are refitted in one pass, nothing is refined, and a tolerance is asked "
            f"only of the validation images themselves: {error}",
            stacklevel=4,
        )
        plain = replace(settings, search="binary", rounds=1, recovery="once", joint=0, confidence=None)
        return Published(model, traced, batches, replace(goal, refine=0.0, settings=plain), judge, progress)
    return Measured(model, traced, batches, goal, judge, progress)
