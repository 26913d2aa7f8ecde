"""Refitting layers together: those that make the kept channels and those that read them.

Compensation changes the reader only; the channels that are left are those of the original. Adjusting their filters as
well is a least-squares problem with an activation in between: a few Gauss-Newton steps on a stretch of the network,
from a maker to what follows the reader, towards what left that stretch in the original. Longer stretches let layers
make up for each other. Held-out images choose among the steps, none included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from recoup.algebra.gauss_newton import Parameters, gauss_newton
from recoup.calibrate import Calibration
from recoup.judging.sample import HELD_OUT, Sample
from recoup.sequence.adjusting import Adjustable
from recoup.sequence.cutting import Cutter
from recoup.sequence.lockstep import Lockstep, Passage
from recoup.sequence.parking import memory_of, work_of
from recoup.sequence.stretches import parts_of, stretches_of
from recoup.structure.route import Route, Stop, Stretch

# Conjugate-gradient iterations of every Gauss-Newton step.
ITERATIONS = 4
# Images that take part in a joint refit: as many as have so many bytes of activations, and on a GPU and elsewhere this
# many at least. Every step runs forwards and backwards over them some twenty times. Where images are small, deep in a
# network, many are needed, and many can be had.
BYTES, GPU_IMAGES, CPU_IMAGES = 8 << 30, 2000, 200
# A step that lowers the held-out error by less than this share is the last.
WORTHWHILE = 0.01


class JointRefits:
    """The stretches of a pruned network that can be refitted as a whole, by the stop they end at."""

    def __init__(
        self, calibration: Calibration, sample: Sample, keep: Tensor, path: Route, written: Mapping[str, Tensor]
    ) -> None:
        self._calibration, self._sample, settings = calibration, sample, calibration.settings
        is_wanted = settings.joint and path.is_pure
        self.stretches = stretches_of(calibration, path, written, settings.span) if is_wanted else {}
        self._cutter = Cutter(calibration, keep, written) if self.stretches else None

    def refit(self, walk: Lockstep, stop: Stop, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors of the stretch that ends at a stop, written, if there is one and held-out images gain."""
        stretch = self.stretches.get(stop.node)
        work = None if stretch is None else self.adjustable(walk, stretch, written)
        if stretch is None or work is None:
            return {}
        try:
            changes = refit_jointly(work, walk, stretch, self._sample, self._calibration.settings.joint)
        except NotImplementedError:  # an operation without a derivative
            return {}
        changed = {} if changes is None else work.tensors(changes)
        if changed:
            walk.rewrite(stretch, changed)
        return changed

    def adjustable(self, walk: Lockstep, stretch: Stretch, written: Mapping[str, Tensor]) -> Adjustable | None:
        """The stretch as a function of its tensors; None where it cannot be run at the size that is left."""
        if self._cutter is None or not self._cutter.runs(stretch):
            return None
        tensors = {**self._calibration.parameters, **written}
        parts = parts_of(self._calibration, stretch, tensors)
        work = Adjustable(self._cutter, walk, stretch, parts, tensors)
        tried = map(_few, walk.passages(stretch, [*self._sample.held[:1], *self._sample.seen[:1]]))
        return work if parts and all(work.is_sound(few) and work.has_gradient(few) for few in tried) else None


def refit_jointly(work: Adjustable, walk: Lockstep, stretch: Stretch, sample: Sample, steps: int) -> Parameters | None:
    """Changes that make what leaves the stretch more like the original's on held-out images; None if none do."""
    least = GPU_IMAGES if walk.device.type == "cuda" else CPU_IMAGES
    images = max(least, walk.bearable(stretch, BYTES))
    seen = list(passages(walk, stretch, sample.seen, images))
    held = passages(walk, stretch, sample.held, images // (HELD_OUT - 1))
    work.whiten(seen)
    fitting, judging = ([work.residual(passage) for passage in side] for side in (seen, held))
    start = found = work.start()
    room = _room(walk, stretch)
    for _ in range(steps):
        found, after, before = gauss_newton(fitting, judging, found, ITERATIONS, room)
        if not after < (1 - WORTHWHILE) * before:
            break
    return None if found is start else found


def passages(walk: Lockstep, stretch: Stretch, places: Sequence[int], images: int) -> Iterator[Passage]:
    """Up to so many images on their way through a stretch, a bounded number of them at a time."""
    step = walk.bearable(stretch, work_of(walk.device))
    images = min(images, walk.storable(stretch, memory_of(walk.device) // 2))
    for passage in walk.passages(stretch, places):
        for part in passage.split(max(1, min(step, images))):
            if images <= 0:
                return
            yield part.pick(torch.arange(min(images, part.size)))
            images -= part.size


def _few(passage: Passage) -> Passage:
    """One or two samples, and not all of them if there are more: only then is seen whether they can be picked."""
    return passage.pick(torch.arange(max(1, min(2, passage.size - 1))))


def _room(walk: Lockstep, stretch: Stretch) -> int:
    """How many of the parts that `passages` makes may stay in memory with all their activations."""
    at_once = walk.bearable(stretch, work_of(walk.device))
    return walk.bearable(stretch, memory_of(walk.device) // 2) // at_once
