"""Refitting two layers together: the one that makes the kept channels and the one that reads them.

Compensation changes the reader only; the channels that are left are those of the original. Adjusting their filters as
well is a least-squares problem with an activation in between: a few Gauss-Newton steps on the stretch of network from
the maker to what follows the reader, towards what left that stretch in the original. Held-out images have to agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recoup.algebra.gauss_newton import Parameters, Residual, gauss_newton, total
from recoup.judging.sample import Sample
from recoup.sequence.cutting import Cutter, agree
from recoup.sequence.lockstep import Lockstep, Passage
from recoup.sequence.parking import memory_of
from recoup.structure.route import Stretch

# Conjugate-gradient iterations of every Gauss-Newton step.
ITERATIONS = 8
# Images that take part in a joint refit: every step runs forwards and backwards over them some fifty times.
IMAGES = 4000
# A step that lowers the held-out error by less than this share is the last.
WORTHWHILE = 0.01
# Bytes of activations that are in work at once.
IN_WORK = 2 << 30


class Adjustable:
    """The tensors of a stretch, cut to what is left of them, as parameters."""

    def __init__(self, cutter: Cutter, walk: Lockstep, stretch: Stretch, tensors: Mapping[str, Tensor]) -> None:
        self._cutter, self._walk, self._stretch, self._whole = cutter, walk, stretch, tensors
        self._base = {name: cutter.tensor(name, value) for name, value in tensors.items()}

    def start(self) -> Parameters:
        """No change at all."""
        return tuple(torch.zeros_like(value) for value in self._base.values())

    def rates(self, share: float) -> list[float]:
        """A step length for every tensor: this share of its root mean square, of all of them for one of zeros."""
        sizes = [float(value.square().mean().sqrt()) for value in self._base.values()]
        return [share * (size or max(sizes, default=0.0)) for size in sizes]

    def tensors(self, changes: Parameters) -> dict[str, Tensor]:
        """The whole tensors with these changes to what is left of them."""
        moved = self._moved(changes)
        return {name: self._cutter.restored(name, value, moved[name]) for name, value in self._whole.items()}

    def is_sound(self, passage: Passage) -> bool:
        """Whether the cut stretch computes what the whole one does."""
        few = passage.pick(torch.arange(min(2, passage.size)))
        try:
            whole = self._walk.run(self._stretch, few.entries, {})
            with torch.no_grad():
                cut = self._run(self._entries(few), self.start())
        except RuntimeError:  # a size that does not follow the samples or the channels
            return False
        return agree({name: self._cutter.value(name, value) for name, value in whole.items()}, cut)

    def residual(self, passage: Passage) -> Residual:
        """What leaves the stretch, less what should, relative to its spread: a function of the changes."""
        entries = self._entries(passage)
        targets = {n: self._cutter.value(n, value) for n, value in passage.exits.items() if _is_real(value)}
        scales = {name: _spread(value) for name, value in targets.items()}

        def residual(changes: Parameters) -> Tensor:
            exits = self._run(entries, changes)
            parts = [(exits[name] - target) / scales[name] for name, target in targets.items()]
            return torch.cat([part.flatten() for part in parts])

        return residual

    def _entries(self, passage: Passage) -> dict[str, Any]:
        return {name: self._cutter.value(name, value) for name, value in passage.entries.items()}

    def _moved(self, changes: Parameters) -> dict[str, Tensor]:
        return {name: value + change for (name, value), change in zip(self._base.items(), changes, strict=True)}

    def _run(self, entries: Mapping[str, Any], changes: Parameters) -> dict[str, Any]:
        return self._cutter.run(self._stretch, entries, self._walk.stored, self._moved(changes))


def refit_jointly(work: Adjustable, walk: Lockstep, stretch: Stretch, sample: Sample, steps: int) -> Parameters | None:
    """Changes that make what leaves the stretch more like the original's on held-out images; None if none do."""
    fitting = list(pieces(work, walk, stretch, sample.seen, IMAGES))
    judging = list(pieces(work, walk, stretch, sample.held, IMAGES))
    best, least = None, total(judging, work.start())
    found = work.start()
    for _ in range(steps):
        moved, after, before = gauss_newton(fitting, found, ITERATIONS)
        if not after < before:
            break
        found, judged = moved, total(judging, moved)
        gained = 1 - judged / least if least > 0 else 0.0
        if judged < least:
            best, least = found, judged
        if gained < WORTHWHILE:
            break
    return best


def pieces(
    work: Adjustable, walk: Lockstep, stretch: Stretch, places: Sequence[int], images: int
) -> Iterator[Residual]:
    """Residuals of up to so many images, a bounded number of them at a time."""
    step = walk.bearable(stretch, IN_WORK)
    images = min(images, walk.bearable(stretch, memory_of(walk.device)))
    for passage in walk.passages(stretch, places):
        for part in passage.split(step):
            if images <= 0:
                return
            images -= part.size
            yield work.residual(part)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _spread(value: Tensor) -> float:
    """What makes the squared residual of a value its error relative to its variance, for one sample."""
    centred = value - (value.mean(dim=0, keepdim=True) if len(value) > 1 else value.mean())
    return max(math.sqrt(float(centred.square().sum()) / max(1, len(value))), 1e-12)
