"""Which recovery to keep: held-out images decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from recoup.calibrate import Calibration
from recoup.judging.harm import Reference
from recoup.judging.sample import Sample
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import Compensator
from recoup.sequence.refine import refine
from recoup.sequence.refit import recover_in_sequence

# Images that are enough to compare candidates by.
QUICK_IMAGES = 4000
ONCE, SEQUENCE, REFINED = "one pass", "in sequence", "refined"


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A plan, and the harm on held-out images of every variant that was tried: the plan's is the least."""

    plan: Plan
    harms: Mapping[str, float]


class Recoverer:
    """Makes plans for masks: in one pass, then in sequence from there; what harms held-out images least is kept."""

    def __init__(self, calibration: Calibration, sample: Sample, reference: Reference) -> None:
        self._calibration, self._sample, self._reference = calibration, sample, reference
        self._compensator = Compensator(calibration)

    def plan(self, keep: Tensor, progress: Progress = silent, *, quick: bool = False) -> Chosen:
        """The better of both ways to recover what `keep` leaves.

        A `quick` one is fitted on fewer images and refits no layers jointly.
        """
        calibration = self._calibration
        once = self._compensator.plan(keep)
        chosen = Chosen(once, {ONCE: self._reference.harm(once.weights)})
        if calibration.settings.recovery == "once" or not once.weights:
            return chosen
        sample = self._sample
        if quick:
            calibration = replace(calibration, settings=replace(calibration.settings, joint=0))
            sample = sample.part(QUICK_IMAGES)
        return self._better(chosen, SEQUENCE, recover_in_sequence(calibration, sample, keep, once, progress))

    def refined(self, chosen: Chosen, keep: Tensor, seconds: float, progress: Progress = silent) -> Chosen:
        """The plan after `seconds` of refinement, if that has helped."""
        plan = refine(self._calibration, self._sample, keep, chosen.plan, seconds, progress)
        return self._better(chosen, REFINED, plan)

    def _better(self, before: Chosen, name: str, plan: Plan) -> Chosen:
        harm = self._reference.harm(plan.weights)
        harms = {**before.harms, name: harm}
        return Chosen(plan if harm < min(before.harms.values()) else before.plan, harms)
