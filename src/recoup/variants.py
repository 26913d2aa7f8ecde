"""Which recovery to keep: held-out images decide.

Refitted layer after layer, a network makes class scores of another scale than the original's. That changes no answer
but the divergence; so before they are compared, the scores of a plan are scaled back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from recoup.calibrate import Calibration
from recoup.judging.harm import Reference
from recoup.judging.sample import Sample
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import Compensator, assemble
from recoup.sequence.refine import refine
from recoup.sequence.refit import recover_in_sequence
from recoup.structure.groups import Consumer

# Images that are enough to compare candidates by.
QUICK_IMAGES = 4000
# The square of the sum of a layer's rows, relative to what it would be if they had nothing to do with each other, below
# which the layer was trained by cross-entropy.
CANCELLED = 0.5
ONCE, SEQUENCE, REFINED = "one pass", "in sequence", "refined"
NOT_REFINED = (
    "nothing was refined: gradient steps need to run the smaller network operation by operation, and the derivatives "
    "of all of them, which this one does not allow. The result is the closed-form one."
)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A plan, and the harm on held-out images of every variant that was tried: the plan's is the least."""

    plan: Plan
    harms: Mapping[str, float]


class Recoverer:
    """Makes plans for masks: in one pass, then in sequence from there; what harms held-out images least is kept.

    That the outputs are class scores may be known from elsewhere; otherwise the weights that make them tell.
    """

    def __init__(
        self, calibration: Calibration, sample: Sample, reference: Reference, *, are_classes: bool = False
    ) -> None:
        self._calibration, self._sample, self._reference = calibration, sample, reference
        self._compensator = Compensator(calibration)
        head = head_of(calibration)
        self._head = head if head is not None and (are_classes or makes_classes(calibration, head)) else None

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
        plan = recover_in_sequence(calibration, sample, keep, once, progress)
        return self._better(chosen, SEQUENCE, self._scaled(plan, keep))

    def refined(self, chosen: Chosen, keep: Tensor, seconds: float, progress: Progress = silent) -> Chosen:
        """The plan after `seconds` of refinement, if that has helped."""
        plan = refine(self._calibration, self._sample, keep, chosen.plan, seconds, progress)
        if plan is None:
            warnings.warn(NOT_REFINED, stacklevel=4)
            return chosen
        return self._better(chosen, REFINED, self._scaled(plan, keep))

    def _scaled(self, plan: Plan, keep: Tensor) -> Plan:
        """The plan with the scale of the class scores that harms least, where there is a layer known to make some."""
        if self._head is None or (gain := self._reference.gain(plan.weights)) == 1.0:
            return plan
        tensors = {**self._calibration.parameters, **plan.weights}
        scaled = {name: gain * tensors[name] for name in (self._head.weight, *self._head.biases) if name in tensors}
        return assemble(self._calibration, keep, {**plan.weights, **scaled}, plan.recovery)

    def _better(self, before: Chosen, name: str, plan: Plan) -> Chosen:
        harm = self._reference.harm(plan.weights)
        harms = {**before.harms, name: harm}
        return Chosen(plan if harm < min(before.harms.values()) else before.plan, harms)


def head_of(calibration: Calibration) -> Consumer | None:
    """The layer that makes all that the network returns, if nothing else uses its weight."""
    graph = calibration.traced.standalone.host.graph
    *_, output = graph.nodes
    returned = output.all_input_nodes
    found = [c for c in calibration.structure.consumers if len(returned) == 1 and c.node == returned[0].name]
    if not found:
        return None
    tensors = {found[0].weight, *found[0].biases}
    uses = [user for node in graph.nodes if node.op == "get_attr" and node.target in tensors for user in node.users]
    return found[0] if all(user is returned[0] for user in uses) else None


def makes_classes(calibration: Calibration, head: Consumer) -> bool:
    """Whether a layer's outputs are class scores, and no values of another kind, by how it was trained.

    Cross-entropy does not see what is added to all scores alike. So training leaves the sum of the rows that make them
    as it was, and weight decay takes that away: they cancel out.
    """
    rows = calibration.parameters[head.weight].detach().double().movedim(1 - head.input_dim, 0).flatten(1)
    return float(rows.sum(dim=0).square().sum()) < CANCELLED * float(rows.square().sum())
