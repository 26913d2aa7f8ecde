"""A second round of allocation: what every group is worth in the pruned network, after recovery.

Cut alone and compensated in one pass, a group is charged for errors that the layers behind it would make up for, and
recovery in sequence repairs early errors far better than late ones. So with the widths of the first round decided,
groups get all of their channels back, a few neighbours at a time, and the network is recovered. What held-out images
gain, relative to what these groups were thought to cost, is a factor on their error at every width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from recoup.allocation.measured import Allocator
from recoup.progress import Progress, silent
from recoup.recovery.choose import ONE_PASS, Recovered

# Recoveries of a second round, at most.
LOOKS = 12
# Where recovery in sequence leaves more than this share of the error of one pass, measurements in one pass will do.
WORTHWHILE = 0.7
# The factor of a group is at least this share of the mean: what seems to cost nothing may cost something elsewhere.
LEAST = 0.1

# The recovery of a mask, of which the output errors are looked at.
Recover: TypeAlias = Callable[[Tensor], Recovered]


def keep_in_rounds(
    allocator: Allocator,
    decide: Callable[[Allocator], Tensor],
    recover: Recover,
    rounds: int,
    progress: Progress = silent,
) -> Tensor:
    """The mask that `decide` finds in an allocator, or in what later rounds make of it if that errs less."""
    keep = decide(allocator)
    for _ in range(1, rounds):
        before = recover(keep)
        again = reconsidered(allocator, keep, before, recover, progress)
        other = keep if again is allocator else decide(again)
        if bool((other == keep).all()) or recover(other).error >= before.error:
            break
        allocator, keep = again, other
    return keep


def reconsidered(
    allocator: Allocator, keep: Tensor, before: Recovered, recover: Recover, progress: Progress = silent
) -> Allocator:
    """The allocator with errors as they are around a mask; the same one where one pass tells as much."""
    expected = _expected(allocator, keep)
    can_change = {name for name, curve in allocator.curves.items() if curve.least < curve.most}
    cut = [name for name, error in expected.items() if error > 0 and name in can_change]
    if not cut or before.error > WORTHWHILE * before.errors[ONE_PASS]:
        return allocator
    size = math.ceil(len(cut) / LOOKS)
    bundles = [cut[start : start + size] for start in range(0, len(cut), size)]
    factors: dict[str, float] = {}
    # Last groups first: up to them the network is the one before, of which recovery in sequence knows its solutions.
    for number, bundle in enumerate(reversed(bundles), start=1):
        gain = before.error - recover(_whole_again(allocator, keep, bundle)).error
        factors |= dict.fromkeys(bundle, gain / sum(expected[name] for name in bundle))
        progress("second round", number, len(bundles))
    return _scaled(allocator, factors)


def _expected(allocator: Allocator, keep: Tensor) -> dict[str, float]:
    """The errors that groups were thought to cause, at the widths of a mask."""
    counts = allocator.counts(keep)
    return {name: float(curve.errors[counts[name]]) for name, curve in allocator.curves.items()}


def _whole_again(allocator: Allocator, keep: Tensor, names: list[str]) -> Tensor:
    restored = keep.clone()
    for name in names:
        restored[allocator.widths.structure.group(name).channels] = True
    return restored


def _scaled(allocator: Allocator, factors: Mapping[str, float]) -> Allocator:
    """Errors times their factors; groups that have none get the mean."""
    mean = sum(factors.values()) / len(factors)
    if mean <= 0:
        return allocator
    scales = {name: max(factors.get(name, mean), LEAST * mean) for name in allocator.curves}
    curves = {name: replace(curve, errors=scales[name] * curve.errors) for name, curve in allocator.curves.items()}
    return replace(allocator, curves=curves)
