"""Recoveries by name: what becomes of the weights that stay, from nothing at all to gradient steps.

Each takes a calibration, the mask over all channels and where to report progress, and returns a `Recovered`. Those of
the one-pass family need no more than one pass over the images, and any method's calibration will do. The others refit
layers in the pruned network and judge by held-out images, so they need a calibration of `Best` or `Fast`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from recoup.config import SequentialMethod
from recoup.errors import unknown_name
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recovery.batch_norm import recover_batch_norms
from recoup.recovery.choose import IN_SEQUENCE, JOINT, Recovered, reference_of, refined, scaled
from recoup.recovery.cutting import recover_nothing
from recoup.recovery.mean_shift import recover_means
from recoup.recovery.methods import sequential_method
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.recovery.sequential import recover_in_sequence
from recoup.statistics.calibrate import Calibration

RecoverByName: TypeAlias = Callable[[Calibration, Tensor, Progress], Recovered]

# Steps of a joint refit, and seconds of a refinement, where the method has none of its own.
JOINT_STEPS = 4
REFINE_SECONDS = 10.0


def recover_by_name(name: str, calibration: Calibration, keep: Tensor, progress: Progress = silent) -> Recovered:
    """What the recovery of that name makes of what `keep`, a mask over all channels, leaves."""
    return find_recovery(name)(calibration, keep, progress)


def find_recovery(name: str) -> RecoverByName:
    """The recovery of that name.

    Raises:
        UsageError: there is none.
    """
    if not isinstance(name, str) or name not in RECOVERIES:
        raise unknown_name("recovery", name, RECOVERIES)
    return RECOVERIES[name]


def _from_statistics(
    name: str,
    plan_for: Callable[[Calibration, Tensor], Plan],
    calibration: Calibration,
    keep: Tensor,
    progress: Progress,  # noqa: ARG001 - every recovery takes it
) -> Recovered:
    """A plan of the one-pass family, judged where the method holds images out."""
    return _judged(calibration, name, plan_for(calibration, keep))


def _in_sequence(calibration: Calibration, keep: Tensor, progress: Progress) -> Recovered:
    return _refitted(calibration, keep, progress, IN_SEQUENCE, 0)


def _jointly(calibration: Calibration, keep: Tensor, progress: Progress) -> Recovered:
    return _refitted(calibration, keep, progress, JOINT, sequential_method(calibration).joint_steps or JOINT_STEPS)


def _refined(calibration: Calibration, keep: Tensor, progress: Progress) -> Recovered:
    seconds = sequential_method(calibration).refine or REFINE_SECONDS
    before = _jointly(calibration, keep, progress)
    return refined(calibration, before, keep, progress, seconds=seconds) if before.plan.weights else before


def _refitted(calibration: Calibration, keep: Tensor, progress: Progress, name: str, steps: int) -> Recovered:
    """Layers refitted one after the other from the one-pass weights on, class scores scaled to err least."""
    sequential_method(calibration)  # refuses any other before the work
    start = recover_in_one_pass(calibration, keep)
    if not start.weights:
        return _judged(calibration, name, start)
    plan = recover_in_sequence(calibration, calibration.split, keep, start, progress, joint_steps=steps)
    return _judged(calibration, name, scaled(calibration, plan, keep))


def _judged(calibration: Calibration, name: str, plan: Plan) -> Recovered:
    if not isinstance(calibration.method, SequentialMethod):
        return Recovered(plan, {})
    return Recovered(plan, {name: reference_of(calibration).error(plan.weights)})


# Those that `Paper` takes: from the statistics of the original network, or one more pass over the images.
ONE_PASS_FAMILY: Mapping[str, Callable[[Calibration, Tensor], Plan]] = MappingProxyType(
    {
        "none": recover_nothing,
        "mean-shift": recover_means,
        "batch-norm": recover_batch_norms,
        "one-pass": recover_in_one_pass,
        "rescale": partial(recover_in_one_pass, rescale=True),
    }
)
RECOVERIES: Mapping[str, RecoverByName] = MappingProxyType(
    {
        **{name: partial(_from_statistics, name, plan_for) for name, plan_for in ONE_PASS_FAMILY.items()},
        "in-sequence": _in_sequence,
        "joint": _jointly,
        "refined": _refined,
    }
)
