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

from recoup.algebra.gauss_newton import Parameters
from recoup.batches import Inputs
from recoup.calibrate import Calibration
from recoup.judging.harm import harm_between
from recoup.judging.sample import Sample
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import assemble
from recoup.replay import Replay
from recoup.sequence.adjusting import Adjustable
from recoup.sequence.cutting import Cutter
from recoup.sequence.lockstep import Lockstep, Passage
from recoup.sequence.parking import work_of
from recoup.sequence.stretches import parts_of
from recoup.sequence.varying import varied
from recoup.structure.route import Route, Stretch, route, whole_stretch
from recoup.structure.standalone import Standalone

# The first step of every parameter, in units in which 1 is the size of its layer's weights; it falls to zero over time.
RATE = 0.004
# Samples of a gradient step, and those from which the units are taken.
SAMPLES, UNIT_SAMPLES = 256, 512
# Steps that may wait for a GPU at a time; more would go on after the time is over.
AHEAD = 8


def refine(
    calibration: Calibration, sample: Sample, keep: Tensor, start: Plan, seconds: float, progress: Progress = silent
) -> Plan | None:
    """The plan after about `seconds` of refinement; None where the smaller network cannot be run by operations.

    Or where what it returns has no derivative.
    """
    host = calibration.traced.standalone.host
    path = route(host.graph, calibration.structure)
    if not path.is_pure or not path.stops:
        return None
    written = {name: value.to(sample.device) for name, value in start.weights.items()}
    tensors = {**calibration.parameters, **written}
    stretch, cutter = whole_stretch(path, calibration.structure), Cutter(calibration, keep, written)
    if not cutter.runs(stretch):
        return None
    with _walking(host, path, {}, sample.device) as original, _walking(host, path, written, sample.device) as pruned:
        work = Adjustable(cutter, pruned, stretch, parts_of(calibration, stretch, tensors), tensors)
        draws = _Draws(sample, pruned.bearable(stretch, work_of(sample.device)), calibration.settings.seed)

        def passage(values: Mapping[str, Any]) -> Passage:
            with torch.no_grad():
                return Passage(values, original.run(stretch, values, {}))

        few = passage(pruned.entering(draws(2)))
        if not (work.is_sound(few) and work.has_gradient(few)):
            return None
        arranged = work.laid_out if _runs(original, stretch, work.laid_out(few.entries)) else dict

        def draw(count: int) -> dict[str, Any]:
            return arranged(pruned.entering(draws(count)))

        work.whiten([passage(draw(UNIT_SAMPLES))], relative=True)
        descent = _Descent(work, passage, calibration.settings.outputs, sample.device)
        changes = descent.run(lambda: draw(SAMPLES), seconds, progress)
    return assemble(calibration, keep, {**written, **work.tensors(changes)}, start.recovery)


def _walking(host: Standalone, path: Route, written: Mapping[str, Tensor], device: torch.device) -> closing[Lockstep]:
    """A walk of no batches, which only runs stretches."""
    return closing(Lockstep(host, path, (), written, device))


def _runs(original: Lockstep, stretch: Stretch, values: Mapping[str, Any]) -> bool:
    """Whether the original, too, can do with values as they lie in memory."""
    try:
        with torch.no_grad():
            original.run(stretch, values, {})
    except RuntimeError:  # a view that goes by another order
        return False
    return True


class _Draws:
    """Calibration images at random, varied; up to `most` at a time."""

    def __init__(self, sample: Sample, most: int, seed: int) -> None:
        self._sample, self._most = sample, most
        self._sizes = torch.tensor([float(sample.batches[place].size) for place in sample.seen])
        self._choosing = torch.Generator().manual_seed(seed)
        self._varying = torch.Generator(sample.device).manual_seed(seed)

    def __call__(self, count: int) -> Inputs:
        place = int(torch.multinomial(self._sizes, 1, generator=self._choosing))
        batch = self._sample.batches[self._sample.seen[place]]
        chosen = torch.randint(batch.size, (min(count, self._most),), generator=self._choosing)
        return varied(batch.pick(chosen).to(self._sample.device), self._varying)


class _Descent:
    """Adam on the changes to a stretch, towards what leaves it in the original."""

    def __init__(
        self, work: Adjustable, passage: Callable[[Mapping[str, Any]], Passage], kind: str, device: torch.device
    ) -> None:
        self._work, self._passage, self._kind, self._device = work, passage, kind, device
        self._changes = tuple(part.requires_grad_() for part in work.start())
        self._rate = torch.tensor(RATE, device=device)
        self._optimiser = torch.optim.Adam(self._changes, lr=self._rate, capturable=device.type == "cuda")

    def run(self, draw: Callable[[], Mapping[str, Any]], seconds: float, progress: Progress) -> Parameters:
        """The changes after so many seconds, the rate falling to zero."""
        step, begin, told, number = Replay(self._step, self._device), time.perf_counter(), 0, 0
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
            loss = harm_between(*self._work.outcomes(self._passage(values), self._changes), self._kind)
            self._optimiser.zero_grad()
            loss.backward()
        self._optimiser.step()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
