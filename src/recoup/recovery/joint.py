"""Refitting layers together: those that make the kept channels and those that read them.

Compensation changes the reader only; the channels that are left are those of the original. Adjusting their filters as
well is a least-squares problem with an activation in between: a few Gauss-Newton steps on a segment of the network,
from a maker to what follows the reader, towards what left that segment in the original. Longer segments let layers
make up for each other. Held-out images choose among the steps, none included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from recoup.algebra.gauss_newton import Parameters, gauss_newton
from recoup.channels.settling import settled
from recoup.inputs.split import HELD_OUT, Split
from recoup.recovery.activation_store import memory_of, resident_of, work_of
from recoup.recovery.cut_graph import CutGraph
from recoup.recovery.failures import surviving
from recoup.recovery.methods import sequential_method
from recoup.recovery.parts import parts_of
from recoup.recovery.schedule import RefitPoint, Schedule
from recoup.recovery.segment_problem import SegmentProblem
from recoup.recovery.segments import Segment, segments_of
from recoup.recovery.twin_run import SegmentBatch, TwinRun
from recoup.statistics.calibrate import Calibration

# Conjugate-gradient iterations of every Gauss-Newton step.
ITERATIONS = 4
# Images that take part in a joint refit: as many as have so many bytes of activations, and on a GPU and elsewhere this
# many at least. Every step runs forwards and backwards over them some twenty times. Where images are small, deep in a
# network, many are needed, and many can be had.
BYTES, GPU_IMAGES, CPU_IMAGES = 8 << 30, 2000, 200
# A step that lowers the held-out error by less than this share is the last.
WORTHWHILE = 0.01


class JointRefits:
    """The segments of a pruned network that can be refitted as a whole, by the point they end at."""

    def __init__(
        self,
        calibration: Calibration,
        split: Split,
        keep: Tensor,
        schedule: Schedule,
        written: Mapping[str, Tensor],
        steps: int,
    ) -> None:
        self._calibration, self._split, self._keep, self._steps = calibration, split, keep, steps
        span = sequential_method(calibration).span
        self.segments = segments_of(calibration, schedule, written, span) if steps and schedule.is_pure else {}
        self._cut_graph = CutGraph(calibration, keep, written) if self.segments else None

    def refit(self, twin: TwinRun, point: RefitPoint, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors of the segment that ends at a point, written, if there is one and held-out images gain."""
        segment = self.segments.get(point.node)
        changed: dict[str, Tensor] = {}
        with surviving("the joint refit", point.consumer.name, needs_derivative=True):
            problem = None if segment is None else self.problem(twin, segment, written)
            if segment is not None and problem is not None:
                changes = refit_jointly(problem, twin, segment, self._split, self._steps)
                found = {} if changes is None else problem.tensors(changes)
                changed = settled(self._calibration.structure, {}, found, self._keep)
        if segment is not None and changed:
            twin.rewrite(segment, changed)
        return changed

    def problem(self, twin: TwinRun, segment: Segment, written: Mapping[str, Tensor]) -> SegmentProblem | None:
        """The segment as a function of its tensors; None where it cannot be run at the size that is left."""
        if self._cut_graph is None or not self._cut_graph.runs(segment):
            return None
        tensors = {**self._calibration.parameters, **written}
        parts = parts_of(self._calibration, segment, tensors)
        if not parts:
            return None
        work = SegmentProblem(self._cut_graph, twin, segment, parts, tensors)
        tried = twin.segment_batches(segment, [*self._split.held[:1], *self._split.fit[:1]])
        return work if all(twin.can_be_parted(batch) and _serves(work, _few(batch)) for batch in tried) else None


def refit_jointly(work: SegmentProblem, twin: TwinRun, segment: Segment, split: Split, steps: int) -> Parameters | None:
    """Changes that make what leaves the segment more like the original's on held-out images; None if none do."""
    least = GPU_IMAGES if twin.device.type == "cuda" else CPU_IMAGES
    images = max(least, twin.bearable(segment, BYTES))
    seen = list(segment_batches(twin, segment, split.fit, images))
    held = segment_batches(twin, segment, split.held, images // (HELD_OUT - 1))
    work.whiten(seen)
    # Residuals hold what they need, cut and laid out anew: of what they are made from, nothing is kept besides.
    fitting, judging = [work.residual(seen.pop(0)) for _ in range(len(seen))], [work.residual(batch) for batch in held]
    start = found = work.start()
    room = _room(twin, segment)
    for _ in range(steps):
        found, after, before = gauss_newton(fitting, judging, found, ITERATIONS, room)
        if not after < (1 - WORTHWHILE) * before:
            break
    return None if found is start else found


def segment_batches(twin: TwinRun, segment: Segment, places: Sequence[int], images: int) -> Iterator[SegmentBatch]:
    """Up to so many images on their way through a segment, a bounded number of them at a time."""
    step = twin.bearable(segment, work_of(twin.device))
    images = min(images, twin.storable(segment, memory_of(twin.device) // 2))
    for batch in twin.segment_batches(segment, places):
        for part in batch.split(max(1, min(step, images))):
            if images <= 0:
                return
            yield part if part.size <= images else part.pick(torch.arange(images))
            images -= part.size


def _serves(work: SegmentProblem, few: SegmentBatch) -> bool:
    return work.is_sound(few) and work.has_gradient(few)


def _few(batch: SegmentBatch) -> SegmentBatch:
    """One or two samples, and not all of them if there are more: only then is seen whether they can be picked."""
    return batch.pick(torch.arange(max(1, min(2, batch.size - 1))))


def _room(twin: TwinRun, segment: Segment) -> int:
    """How many of the parts that `segment_batches` makes may stay in memory with all their activations."""
    at_once = twin.bearable(segment, work_of(twin.device))
    return twin.bearable(segment, min(resident_of(twin.device), memory_of(twin.device) // 2)) // at_once
