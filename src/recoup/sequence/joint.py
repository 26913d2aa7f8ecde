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
from recoup.calibrate import Calibration
from recoup.judging.sample import Sample
from recoup.sequence.lockstep import MEMORY, Lockstep, Passage
from recoup.structure.layout import Layout
from recoup.structure.route import Stretch

# Conjugate-gradient iterations of every Gauss-Newton step.
ITERATIONS = 8
# Images that take part: a step sees each of them thirty times, and more brought nothing (docs/results.md).
IMAGES = 2000
# Bytes of activations that are in work at once.
IN_WORK = 2 << 30


class Adjustable:
    """The tensors of a stretch as parameters: what is pruned stays as it is."""

    def __init__(
        self, calibration: Calibration, walk: Lockstep, stretch: Stretch, keep: Tensor, tensors: Mapping[str, Tensor]
    ) -> None:
        self._walk, self._stretch, self._base = walk, stretch, tensors
        structure = calibration.structure
        device = next(iter(tensors.values())).device
        self._masks = {name: _mask(structure, name, value, keep).to(device) for name, value in tensors.items()}
        self._kept = {name: _kept(calibration.traced.standalone.layouts.get(name), keep) for name in stretch.exits}

    def start(self) -> Parameters:
        """No change at all."""
        return tuple(torch.zeros_like(value) for value in self._base.values())

    def rates(self, share: float) -> list[float]:
        """A step length for every tensor: this share of the root mean square of its kept part."""
        kept = [(value[mask > 0], value) for value, mask in zip(self._base.values(), self._masks.values(), strict=True)]
        return [share * float((part if part.numel() else whole).square().mean().sqrt()) for part, whole in kept]

    def tensors(self, changes: Parameters) -> dict[str, Tensor]:
        """The tensors with these changes, where something is kept."""
        pairs = zip(self._base.items(), changes, strict=True)
        return {name: value + change * self._masks[name] for (name, value), change in pairs}

    def residual(self, passage: Passage) -> Residual:
        """What leaves the stretch, less what should, relative to its spread: a function of the changes."""
        targets = {name: self._cut(name, value) for name, value in passage.exits.items() if _is_real(value)}
        scales = {name: _spread(value) for name, value in targets.items()}

        def residual(changes: Parameters) -> Tensor:
            exits = self._walk.run(self._stretch, passage.entries, self.tensors(changes))
            parts = [(self._cut(n, exits[n]) - target) / scales[n] for n, target in targets.items()]
            return torch.cat([part.flatten() for part in parts])

        return residual

    def _cut(self, name: str, value: Tensor) -> Tensor:
        dim, kept = self._kept[name]
        return value if kept is None else value.index_select(dim, kept.to(value.device))


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
        if judged < least:
            best, least = found, judged
    return best


def pieces(
    work: Adjustable, walk: Lockstep, stretch: Stretch, places: Sequence[int], images: int
) -> Iterator[Residual]:
    """Residuals of up to so many images, a bounded number of them at a time."""
    step = walk.bearable(stretch, IN_WORK)
    images = min(images, walk.bearable(stretch, MEMORY))
    for passage in walk.passages(stretch, places):
        for part in passage.split(step):
            if images <= 0:
                return
            images -= part.size
            yield work.residual(part)


def _mask(structure: Any, name: str, value: Tensor, keep: Tensor) -> Tensor:
    """1 where a tensor's element belongs to kept channels alone (or to none), 0 elsewhere."""
    mask = torch.ones(value.shape)
    sites = [(site.dim, site.channel_of) for site in structure.sites if site.tensor == name]
    if not sites and value.dim() == 1:  # a bias that the layer did not have before
        sites = [(0, consumer.outputs) for consumer in structure.consumers if name in consumer.biases][:1]
    for dim, channel_of in sites:
        kept = structure.keep_indices(channel_of, keep).float()
        mask = mask * kept.view([-1 if d == dim else 1 for d in range(value.dim())])
    return mask.to(value.dtype)


def _kept(layout: Any, keep: Tensor) -> tuple[int, Tensor | None]:
    if not isinstance(layout, Layout) or layout.dim is None:
        return 0, None
    return layout.dim, layout.kept(keep)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _spread(value: Tensor) -> float:
    """What makes the squared residual of a value its error relative to its variance, for one sample."""
    centred = value - value.mean(dim=0, keepdim=True)
    return max(math.sqrt(float(centred.square().sum()) / max(1, len(value))), 1e-12)
