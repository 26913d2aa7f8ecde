"""Which recovery to keep: held-out images decide.

Refitted layer after layer, a network makes class scores of another scale than the original's. That changes no answer
but the divergence; so before they are compared, the scores of a plan are scaled back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from recoup.channels.structure import Consumer
from recoup.errors import UsageError, warn
from recoup.judge.output_error import Reference
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recovery.cutting import recover_nothing
from recoup.recovery.failures import surviving
from recoup.recovery.methods import sequential_method
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.recovery.plans import assemble
from recoup.recovery.refine import refine
from recoup.recovery.sequential import recover_in_sequence
from recoup.statistics.calibrate import Calibration

# Images that are enough to compare candidates by.
QUICK_IMAGES = 4000
# The square of the sum of a layer's rows, relative to what it would be if they had nothing to do with each other, below
# which the layer was trained by cross-entropy.
CANCELLED = 0.5
UNTOUCHED, ONE_PASS, IN_SEQUENCE, JOINT, REFINED = "no refit", "one pass", "in sequence", "joint", "refined"
NOT_REFINED = (
    "nothing was refined: gradient steps need to run the smaller network operation by operation, and the derivatives "
    "of all of them, which this one does not allow. The result is the closed-form one."
)


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """A plan, and the output error on held-out images of every recovery that was tried: the plan's is the least."""

    plan: Plan
    errors: Mapping[str, float]

    @property
    def error(self) -> float:
        """The output error of the plan; nan where none was measured, as in one pass."""
        return min(self.errors.values(), default=math.nan)


def recover_quickly(calibration: Calibration, keep: Tensor) -> Recovered:
    """The better of both ways to recover what `keep` leaves, on fewer images and without joint refits."""
    return calibration.cache("quick", _key(keep), lambda: _recovered(calibration, keep, silent, is_quick=True))


def recover_in_full(calibration: Calibration, keep: Tensor, progress: Progress = silent) -> Recovered:
    """The better of both ways, on all images and with all that the method has."""
    return calibration.cache("full", _key(keep), lambda: _recovered(calibration, keep, progress, is_quick=False))


def refined(
    calibration: Calibration,
    recovered: Recovered,
    keep: Tensor,
    progress: Progress = silent,
    *,
    seconds: float | None = None,
) -> Recovered:
    """The plan after the seconds of refinement that the method has, or so many `seconds`, if that has helped."""
    seconds = sequential_method(calibration).refine if seconds is None else seconds
    with surviving("refinement", "the network"):
        plan = refine(calibration, calibration.split, keep, recovered.plan, seconds, progress)
        if plan is not None:
            return _better(calibration, recovered, REFINED, scaled(calibration, plan, keep))
        warn(NOT_REFINED)
    return recovered


def reference_of(calibration: Calibration) -> Reference:
    """The original's outputs on the held-out images."""
    return calibration.cache("reference", "held out", lambda: _reference(calibration))


def _reference(calibration: Calibration) -> Reference:
    split, kind = calibration.split, sequential_method(calibration).outputs
    if not split.held:
        raise UsageError(
            f"{type(calibration.method).__name__} judges by held-out images, and none were held out. Split without "
            "held_out=False."
        )
    numbers = [split.numbers[place] for place in split.held]
    return Reference(calibration.traced.standalone.host, split.held_out(), kind, numbers)


def _recovered(calibration: Calibration, keep: Tensor, progress: Progress, *, is_quick: bool) -> Recovered:
    """What was refitted; the weights as they were where even these err less, for few images may mislead every fit."""
    recovered = _refitted(calibration, keep, progress, is_quick=is_quick)
    if not recovered.plan.weights:
        return recovered
    untouched = recover_nothing(calibration, keep)
    error = reference_of(calibration).error(untouched.weights)
    return recovered if not error < recovered.error else Recovered(untouched, {**recovered.errors, UNTOUCHED: error})


def _refitted(calibration: Calibration, keep: Tensor, progress: Progress, *, is_quick: bool) -> Recovered:
    start = recover_in_one_pass(calibration, keep)
    recovered = Recovered(start, {ONE_PASS: reference_of(calibration).error(start.weights)})
    method, split = sequential_method(calibration), calibration.split
    if not start.weights or not method.ridges:
        return recovered
    steps = 0 if is_quick else method.joint_steps
    split = split.part(QUICK_IMAGES) if is_quick else split
    with surviving("recovery in sequence", "the network"):
        plan = recover_in_sequence(calibration, split, keep, start, progress, joint_steps=steps)
        return _better(calibration, recovered, IN_SEQUENCE, scaled(calibration, plan, keep))
    return recovered


def scaled(calibration: Calibration, plan: Plan, keep: Tensor) -> Plan:
    """The plan with the scale of the class scores that errs least, where there is a layer known to make some."""
    head = calibration.cache("head", "class scores", lambda: _scoring_head(calibration))
    if head is None or (gain := reference_of(calibration).gain(plan.weights)) == 1.0:
        return plan
    tensors = {**calibration.parameters, **plan.weights}
    scaled = {name: gain * tensors[name] for name in (head.weight, *head.biases) if name in tensors}
    return assemble(calibration, keep, {**plan.weights, **scaled}, plan.recovery)


def _better(calibration: Calibration, before: Recovered, name: str, plan: Plan) -> Recovered:
    error = reference_of(calibration).error(plan.weights)
    return Recovered(plan if error < before.error else before.plan, {**before.errors, name: error})


def _scoring_head(calibration: Calibration) -> Consumer | None:
    """The layer that makes class scores, if there is one and something says that they are scores."""
    head = head_of(calibration)
    are_scores = sequential_method(calibration).outputs == "classes" or calibration.are_scores
    return head if head is not None and (are_scores or makes_classes(calibration, head)) else None


def head_of(calibration: Calibration) -> Consumer | None:
    """The layer that makes all that the network returns, if nothing else uses its weight."""
    graph = calibration.traced.standalone.host.graph
    *_, output = graph.nodes
    returned = output.all_input_nodes
    found = [c for c in calibration.structure.consumers if len(returned) == 1 and c.node == returned[0].name]
    if not found:
        return None
    biases = {product.bias for product in calibration.structure.products if product.node == found[0].node}
    tensors = {found[0].weight, *found[0].biases, *biases}
    uses = [user for node in graph.nodes if node.op == "get_attr" and node.target in tensors for user in node.users]
    return found[0] if all(user is returned[0] for user in uses) else None


def makes_classes(calibration: Calibration, head: Consumer) -> bool:
    """Whether a layer's outputs are class scores, and no values of another kind, by how it was trained.

    Cross-entropy does not see what is added to all scores alike. So training leaves the sum of the rows that make them
    as it was, and weight decay takes that away: they cancel out.
    """
    rows = calibration.weight(head).detach().double().movedim(1 - head.input_dim, 0).flatten(1)
    return float(rows.sum(dim=0).square().sum()) < CANCELLED * float(rows.square().sum())


def _key(keep: Tensor) -> bytes:
    return keep.cpu().numpy().tobytes()
