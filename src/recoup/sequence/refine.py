"""Refinement: gradient steps on all layers at once, for as long as was asked for.

The smaller network is taught to answer as the original does, on variations of the calibration images, without labels.
The closed-form solution is the start. Where held-out images do not agree that the end is better, it remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from recoup.algebra.gauss_newton import Parameters
from recoup.calibrate import Calibration
from recoup.judging.harm import harm_between
from recoup.judging.sample import Sample
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import assemble
from recoup.sequence.adjusting import Adjustable
from recoup.sequence.cutting import Cutter
from recoup.sequence.lockstep import Lockstep, Passage
from recoup.sequence.parking import work_of
from recoup.sequence.stretches import parts_of
from recoup.sequence.varying import varied
from recoup.structure.route import route, whole_stretch

# The first step of every parameter, in units in which 1 is the size of its layer's weights; it falls to zero over time.
RATE = 0.002
# Samples of a gradient step, and those from which the units are taken.
SAMPLES, UNIT_SAMPLES = 256, 512


def refine(
    calibration: Calibration, sample: Sample, keep: Tensor, start: Plan, seconds: float, progress: Progress = silent
) -> Plan:
    """The plan after about `seconds` of refinement; the plan itself where the smaller network cannot be run."""
    host = calibration.traced.standalone.host
    path = route(host.graph, calibration.structure)
    if not path.is_pure or not path.stops:
        return start
    written = {name: value.to(sample.device) for name, value in start.weights.items()}
    tensors = {**calibration.parameters, **written}
    stretch, cutter = whole_stretch(path, calibration.structure), Cutter(calibration, keep, written)
    if not cutter.runs(stretch):
        return start
    original, pruned = (Lockstep(host, path, (), values, sample.device) for values in ({}, written))
    work = Adjustable(cutter, pruned, stretch, parts_of(calibration, stretch, tensors), tensors)
    step = pruned.bearable(stretch, work_of(sample.device))
    generator = torch.Generator(sample.device).manual_seed(calibration.settings.seed)
    sizes = torch.tensor([float(sample.batches[place].size) for place in sample.seen], device=sample.device)

    def draw(count: int) -> Passage:
        place = sample.seen[int(torch.multinomial(sizes, 1, generator=generator))]
        batch = sample.batches[place]
        chosen = torch.randint(batch.size, (min(count, step),), generator=generator, device=sample.device)
        entries = pruned.entering(varied(batch.pick(chosen).to(sample.device), generator))
        return Passage(entries, original.run(stretch, entries, {}))

    if not work.is_sound(draw(2)):
        return start
    work.whiten([draw(UNIT_SAMPLES)], relative=True)
    changes = _descend(work, lambda: draw(SAMPLES), calibration.settings.outputs, seconds, progress)
    return assemble(calibration, keep, {**written, **work.tensors(changes)}, start.recovery)


def _descend(
    work: Adjustable, draw: Callable[[], Passage], kind: str, seconds: float, progress: Progress
) -> Parameters:
    begin = time.perf_counter()
    changes = [part.requires_grad_() for part in work.start()]
    optimiser = torch.optim.Adam(changes, lr=RATE)
    told = 0
    while (spent := (time.perf_counter() - begin) / max(seconds, 1e-9)) < 1:
        optimiser.param_groups[0]["lr"] = RATE * (1 - spent)
        with torch.enable_grad():
            loss = harm_between(*work.outcomes(draw(), tuple(changes)), kind)
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        if int(100 * spent) > told:
            told = int(100 * spent)
            progress("refine", told, 100)
    progress("refine", 100, 100)
    return tuple(part.detach() for part in changes)
