"""Refinement: gradient steps on all layers at once, for as long as was asked for.

The smaller network is taught to answer as the original does, on variations of the calibration images, without labels.
The closed-form solution is the start. Where held-out images do not agree that the end is better, it remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from recoup.algebra.cuda_graph import RecordedStep
from recoup.algebra.gauss_newton import Parameters
from recoup.graph.standalone import Standalone
from recoup.inputs.augment import augmented
from recoup.inputs.batches import Inputs
from recoup.inputs.split import Split
from recoup.judge.output_error import output_error
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recovery.activation_store import work_of
from recoup.recovery.cut_graph import CutGraph
from recoup.recovery.methods import sequential_method
from recoup.recovery.parts import parts_of
from recoup.recovery.plans import assemble
from recoup.recovery.schedule import Schedule, make_schedule
from recoup.recovery.segment_problem import SegmentProblem
from recoup.recovery.segments import Segment, whole_segment
from recoup.recovery.twin_run import SegmentBatch, TwinRun
from recoup.statistics.calibrate import Calibration

# The first step of every parameter, in units in which 1 is the size of its layer's weights; it falls to zero over time.
RATE = 0.004
# Samples of a gradient step, and those from which the units are taken.
SAMPLES, UNIT_SAMPLES = 256, 512
# Steps that may wait for a GPU at a time; more would go on after the time is over.
AHEAD = 8


def refine(
    calibration: Calibration, split: Split, keep: Tensor, start: Plan, seconds: float, progress: Progress = silent
) -> Plan | None:
    """The plan after about `seconds` of refinement; None where the smaller network cannot be run by operations.

    Or where what it returns has no derivative.
    """
    host = calibration.traced.standalone.host
    schedule = make_schedule(host.graph, calibration.structure)
    if not schedule.is_pure or not schedule.points:
        return None
    written = {name: value.to(split.device) for name, value in start.weights.items()}
    tensors = {**calibration.parameters, **written}
    segment, cut_graph = whole_segment(schedule, calibration.structure), CutGraph(calibration, keep, written)
    if not cut_graph.runs(segment):
        return None
    with (
        _twin_without_images(host, schedule, {}, split.device) as original,
        _twin_without_images(host, schedule, written, split.device) as pruned,
    ):
        work = SegmentProblem(cut_graph, pruned, segment, parts_of(calibration, segment, tensors), tensors)
        draws = _Draws(split, pruned.bearable(segment, work_of(split.device)), calibration.method.seed)

        def segment_batch(values: Mapping[str, Any]) -> SegmentBatch:
            with torch.no_grad():
                return SegmentBatch(values, original.run(segment, values, {}))

        few = segment_batch(pruned.entering(draws(2)))
        if not (work.is_sound(few) and work.has_gradient(few)):
            return None
        arranged = work.laid_out if _runs(original, segment, work.laid_out(few.entries)) else dict

        def draw(count: int) -> dict[str, Any]:
            return arranged(pruned.entering(draws(count)))

        work.whiten([segment_batch(draw(UNIT_SAMPLES))], relative=True)
        descent = _Descent(work, segment_batch, sequential_method(calibration).outputs, split.device)
        changes = descent.run(lambda: draw(SAMPLES), seconds, progress)
    return assemble(calibration, keep, {**written, **work.tensors(changes)}, start.recovery)


def _twin_without_images(
    host: Standalone, schedule: Schedule, written: Mapping[str, Tensor], device: torch.device
) -> closing[TwinRun]:
    """A twin of no batches, which only runs segments."""
    return closing(TwinRun(host, schedule, (), written, device))


def _runs(original: TwinRun, segment: Segment, values: Mapping[str, Any]) -> bool:
    """Whether the original, too, can do with values as they lie in memory."""
    try:
        with torch.no_grad():
            original.run(segment, values, {})
    except RuntimeError:  # a view that goes by another order
        return False
    return True


class _Draws:
    """Calibration images at random, augmented; up to `most` at a time."""

    def __init__(self, split: Split, most: int, seed: int) -> None:
        self._split, self._most = split, most
        self._sizes = torch.tensor([float(split.batches[place].size) for place in split.fit])
        self._choosing = torch.Generator().manual_seed(seed)
        self._augmenting = torch.Generator(split.device).manual_seed(seed)

    def __call__(self, count: int) -> Inputs:
        place = int(torch.multinomial(self._sizes, 1, generator=self._choosing))
        batch = self._split.batches[self._split.fit[place]]
        chosen = torch.randint(batch.size, (min(count, self._most),), generator=self._choosing)
        return augmented(batch.pick(chosen).to(self._split.device), self._augmenting)


class _Descent:
    """Adam on the changes to a segment, towards what leaves it in the original."""

    def __init__(
        self,
        work: SegmentProblem,
        segment_batch: Callable[[Mapping[str, Any]], SegmentBatch],
        kind: str,
        device: torch.device,
    ) -> None:
        self._work, self._segment_batch, self._kind, self._device = work, segment_batch, kind, device
        self._changes = tuple(part.requires_grad_() for part in work.start())
        self._rate = torch.tensor(RATE, device=device)
        self._optimiser = torch.optim.Adam(self._changes, lr=self._rate, capturable=device.type == "cuda")

    def run(self, draw: Callable[[], Mapping[str, Any]], seconds: float, progress: Progress) -> Parameters:
        """The changes after so many seconds, the rate falling to zero."""
        step, begin, told, number = RecordedStep(self._step, self._device), time.perf_counter(), 0, 0
        while (spent := (time.perf_counter() - begin) / max(seconds, 1e-9)) < 1:
            self._rate.fill_(RATE * (1 - spent))
            step(draw())
            number += 1
            if number % AHEAD == 0:
                _finish(self._device)
            if int(100 * spent) > told:
                told = int(100 * spent)
                progress("refine", told, 100)
        progress("refine", 100, 100)
        return tuple(part.detach() for part in self._changes)

    def _step(self, values: Mapping[str, Any]) -> None:
        with torch.enable_grad():
            loss = output_error(*self._work.outcomes(self._segment_batch(values), self._changes), self._kind)
            self._optimiser.zero_grad()
            loss.backward()
        self._optimiser.step()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
