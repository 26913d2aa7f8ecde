"""A second round of allocation: what every group is worth in the pruned network, after recovery.

Cut alone and compensated in one pass, a group is charged for errors that the layers behind it would make up for, and
recovery in sequence repairs early errors far better than late ones. So with the widths of the first round decided,
groups get all of their channels back, a few neighbours at a time, and the network is recovered. What held-out images
gain, relative to what these groups were thought to do, is a factor on their harm at every width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from recoup.progress import Progress, silent
from recoup.search.allocation import Harm
from recoup.search.measured import Allocator
from recoup.variants import ONCE

# Recoveries of a second round, at most.
LOOKS = 12
# Where recovery in sequence leaves more than this share of the harm of one pass, measurements in one pass will do.
WORTHWHILE = 0.7
# The factor of a group is at least this share of the mean: what seems to do no harm may do some elsewhere.
LEAST = 0.1


# What a mask does to held-out images, by the way it is recovered, ONCE among them.
Measure: TypeAlias = Callable[[Tensor], Mapping[str, float]]


def keep_in_rounds(
    allocation: Allocator,
    decide: Callable[[Allocator], Tensor],
    measure: Measure,
    rounds: int,
    progress: Progress = silent,
) -> Tensor:
    """The mask that `decide` finds in an allocation, or in what later rounds make of it if that does less harm."""
    keep, measure = decide(allocation), _remembering(measure)
    for _ in range(1, rounds):
        again = reconsidered(allocation, keep, measure, progress)
        other = keep if again is allocation else decide(again)
        if bool((other == keep).all()) or _least(measure(other)) >= _least(measure(keep)):
            break
        allocation, keep = again, other
    return keep


def reconsidered(allocation: Allocator, keep: Tensor, measure: Measure, progress: Progress = silent) -> Allocator:
    """The allocation with harms as they are around a mask; the same one where one pass tells as much."""
    before, expected = measure(keep), _expected(allocation, keep)
    cut = [name for name, harm in expected.items() if harm > 0]
    if not cut or _least(before) > WORTHWHILE * before[ONCE]:
        return allocation
    size = math.ceil(len(cut) / LOOKS)
    bundles = [cut[start : start + size] for start in range(0, len(cut), size)]
    factors: dict[str, float] = {}
    for number, bundle in enumerate(bundles, start=1):
        gain = _least(before) - _least(measure(_whole_again(allocation, keep, bundle)))
        factors |= dict.fromkeys(bundle, gain / sum(expected[name] for name in bundle))
        progress("second round", number, len(bundles))
    return _scaled(allocation, factors)


def _remembering(measure: Measure) -> Measure:
    made: dict[bytes, Mapping[str, float]] = {}

    def remembered(keep: Tensor) -> Mapping[str, float]:
        place = keep.cpu().numpy().tobytes()
        if place not in made:
            made[place] = measure(keep)
        return made[place]

    return remembered


def _least(harms: Mapping[str, float]) -> float:
    return min(harms.values())


def _expected(allocation: Allocator, keep: Tensor) -> dict[str, float]:
    """What the groups were thought to do, at the widths of a mask."""
    counts = allocation.counts(keep)
    return {name: float(harm.curve[counts[name]]) for name, harm in allocation.harms.items()}


def _whole_again(allocation: Allocator, keep: Tensor, names: list[str]) -> Tensor:
    restored = keep.clone()
    for name in names:
        restored[allocation.widths.structure.group(name).channels] = True
    return restored


def _scaled(allocation: Allocator, factors: Mapping[str, float]) -> Allocator:
    """Harms times their factors; groups that have none get the mean."""
    mean = sum(factors.values()) / len(factors)
    if mean <= 0:
        return allocation
    scales = {name: max(factors.get(name, mean), LEAST * mean) for name in allocation.harms}
    harms = {name: Harm(scales[name] * harm.curve, harm.least) for name, harm in allocation.harms.items()}
    return replace(allocation, harms=harms)
