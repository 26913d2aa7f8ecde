"""Refinement by blocks: gradient steps on one stretch of the network after the other, for as long as was asked for.

Each stretch, with a few layers in it, is trained to turn what enters it in the pruned network into what left it in the
original. No labels, no outputs of the network, only its own activations; the closed-form solution is the start, and a
stretch whose held-out error has not fallen stays at it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from recoup.algebra.gauss_newton import Parameters, Residual, total
from recoup.calibrate import Calibration
from recoup.judging.sample import Sample
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import assemble
from recoup.sequence.cutting import Cutter
from recoup.sequence.joint import IMAGES, Adjustable, pieces
from recoup.sequence.lockstep import Lockstep, Passage
from recoup.sequence.stretches import adjustable, stretches_of
from recoup.structure.route import route

# The first step of every weight, relative to the root mean square of its tensor; it falls to zero over the time given.
RATE = 0.005
# Samples of a gradient step.
SAMPLES = 256


def refine(
    calibration: Calibration, sample: Sample, keep: Tensor, start: Plan, seconds: float, progress: Progress = silent
) -> Plan:
    """The plan after about `seconds` of refinement, every stretch no worse on held-out images than before."""
    host = calibration.traced.standalone.host
    path = route(host.graph, calibration.structure)
    if not path.is_pure:
        return start
    written = {name: value.to(sample.device) for name, value in start.weights.items()}
    stretches = stretches_of(calibration, path, written, span=calibration.settings.span)
    walk = Lockstep(host, path, sample.batches, written, sample.device, stretches=tuple(stretches.values()))
    cutter = Cutter(calibration, keep, written)
    end = time.perf_counter() + seconds
    try:
        for number, stretch in enumerate(stretches.values()):
            work = adjustable(calibration, walk, stretch, cutter, written, sample)
            if work is None:
                progress("refine", number + 1, len(stretches))
                continue
            passages = [part for passage in walk.passages(stretch, sample.seen) for part in passage.split(4 * SAMPLES)]
            share = (end - time.perf_counter()) / (len(stretches) - number)
            changes = _descend(work, passages, list(pieces(work, walk, stretch, sample.held, IMAGES)), share)
            if changes is not None:
                changed = work.tensors(changes)
                walk.rewrite(stretch, changed)
                written |= changed
            progress("refine", number + 1, len(stretches))
    finally:
        walk.close()
    return assemble(calibration, keep, written, start.recovery)


def _descend(
    work: Adjustable, passages: Sequence[Passage], judging: Sequence[Residual], seconds: float
) -> Parameters | None:
    begin = time.perf_counter()
    changes = [part.requires_grad_() for part in work.start()]
    rates = work.rates(RATE)
    groups = [{"params": [part], "lr": rate} for part, rate in zip(changes, rates, strict=True)]
    optimiser = torch.optim.Adam(groups)
    least = total(judging, work.start())
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([float(passage.size) for passage in passages])
    while (spent := (time.perf_counter() - begin) / max(seconds, 1e-9)) < 1:
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - spent)
        passage = passages[int(torch.multinomial(sizes, 1, generator=generator))]
        batch = passage.pick(torch.randint(passage.size, (min(SAMPLES, passage.size),), generator=generator))
        with torch.enable_grad():
            loss = work.residual(batch)(tuple(changes)).square().sum()
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
    found = tuple(part.detach() for part in changes)
    return found if total(judging, found) < least else None
