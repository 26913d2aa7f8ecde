"""The strategy that moves along one share of the cost, for which an allocator knows the widths.

What a candidate loses grows with a power of the share that is removed, the third or the fifth in most networks. Two
candidates tell the power, and so where the next one should lie.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from recoup.allocation.goal import Proposal
from recoup.allocation.measured import Allocator
from recoup.judge.acceptance import Verdict
from recoup.progress import Progress, silent

# Candidates that are recovered and measured on the way to a tolerance, and the share of the cost that is near enough.
CANDIDATES = 6
NEAR = 0.02
# Where full recoveries follow, quick ones only look for where to begin: where so many times the tolerance would be
# lost. They end when the share, or the loss relative to that, is near enough.
BOLDNESS = 1.7
ROUGH = 0.1
CLOSE = 0.2
# How many full ones there may be until one passes, and the share of the tolerance they aim at. After a first one that
# passed there is a second if it promises to remove so large a share of what is left.
FULL_CANDIDATES = 3
AIM = 0.85
PROMISING = 0.1
# The power with which the loss grows: between which limits it is believed, and what is taken where it is not known.
POWERS = (1.0, 6.0)
USUAL_POWER = 4.0
# A bound that is smaller than another by more than this factor tells no more than one at that distance.
FAR = 16.0

# What trials of the two kinds of candidates call the groups.
QUICK, FULL = ("all groups",), ("all groups, in full",)


@dataclass(frozen=True, slots=True)
class Loss:
    """A share of the cost, and the points that may be lost there."""

    share: float
    bound: float

    def along(self, power: float, level: float) -> float:
        """The share at which the bound would be `level` if it grew with a power of what is removed."""
        return 1 - (1 - self.share) * math.pow(level / max(self.bound, level / FAR), 1 / power)


Losses: TypeAlias = Generator[Proposal, Verdict, list[Loss]]


def quick_shares(allocator: Allocator, tolerance: float, progress: Progress = silent) -> Losses:
    """Quick candidates only, ever nearer to the share at which the tolerance is used up."""
    return narrowing(allocator, tolerance, tolerance, NEAR, progress=progress)


def full_shares(allocator: Allocator, tolerance: float, progress: Progress = silent) -> Losses:
    """A few quick candidates find the place for a full one.

    There is a second full one if the first fails or leaves much to gain, and a third if both fail; after that, quick
    ones go on until one passes.
    """
    bold, aim, least = BOLDNESS * tolerance, AIM * tolerance, allocator.least
    quick = yield from narrowing(allocator, tolerance, bold, ROUGH, CLOSE, progress)
    most = min((loss.share for loss in quick if loss.bound < tolerance), default=allocator.most - NEAR)
    power = power_of(quick, bold)
    share = nearest(quick, bold).along(power, bold) if quick else least
    full: list[Loss] = []
    tried: list[Tensor] = []
    passed = False
    while len(tried) < (2 if passed else FULL_CANDIDATES):
        share = min(max(share, least), most)
        fresh = _fresh(allocator, share, share if passed else most, tried)
        if fresh is None:
            break
        cost = allocator.share(fresh)
        verdict = yield Proposal(fresh, FULL, cost, tolerance, cost, in_full=True)
        here = Loss(cost, verdict.bound)
        tried, full = [*tried, fresh], [*full, here]
        passed = passed or here.bound < tolerance
        share = here.along(power_of(full, aim, power), aim)
        if here.bound < tolerance and here.share - max(share, least) < PROMISING * here.share:
            break
    if any(loss.bound < tolerance for loss in (*quick, *full)):
        return full
    return (yield from quick_shares(allocator, tolerance, progress))


def _fresh(allocator: Allocator, share: float, most: float, tried: Sequence[Tensor]) -> Tensor | None:
    """The mask for a share, or for the next one up to `most` that has a mask not tried yet; None if there is none."""
    keep = allocator.keep(share)
    while any(bool((keep == mask).all()) for mask in tried):
        if share >= most:
            return None
        share = min(share + NEAR, most)
        keep = allocator.keep(share)
    return keep


def narrowing(
    allocator: Allocator,
    tolerance: float,
    level: float,
    near: float,
    close: float = 0.0,
    progress: Progress = silent,
) -> Losses:
    """Quick candidates towards the share at which the bound is `level`; what each costs and may lose.

    The next share to try lies where the bound would meet the level if its root grew evenly between the nearest
    candidates below and above; after two that came out alike it is the middle. It ends when those are `near` each
    other, or a bound is `close` to the level.
    """
    below, above = Loss(allocator.most, 0.0), Loss(allocator.least, math.inf)
    found: list[Loss] = []
    sides: list[bool] = []
    for number in range(1, CANDIDATES + 1):
        if below.share - above.share < near:
            break
        is_stuck = len(sides) > 1 and sides[-1] == sides[-2]
        share = (below.share + above.share) / 2 if is_stuck else meeting(below, above, level)
        keep = allocator.keep(share)
        cost = allocator.share(keep)
        verdict = yield Proposal(keep, QUICK, cost, tolerance, cost)
        progress("search", number, CANDIDATES)
        here = Loss(share, verdict.bound)
        found.append(Loss(cost, verdict.bound))
        if abs(here.bound - level) < close * level:
            break
        sides.append(here.bound < level)
        below, above = (here, above) if sides[-1] else (below, here)
    return found


def meeting(below: Loss, above: Loss, level: float) -> float:
    """The share between two losses at which the bound would be `level`; not too close to either."""
    if not math.isfinite(above.bound):
        return (below.share + above.share) / 2
    start, end = math.sqrt(max(below.bound, 0.0)), math.sqrt(max(above.bound, 0.0))
    position = (math.sqrt(level) - start) / max(end - start, 1e-9)
    return below.share - (below.share - above.share) * min(max(position, 0.15), 0.85)


def nearest(losses: Sequence[Loss], level: float) -> Loss:
    """The loss whose bound is nearest to `level`, by their ratio."""
    return min(losses, key=lambda loss: abs(math.log(max(loss.bound, level / FAR) / level)))


def power_of(losses: Sequence[Loss], level: float, usual: float = USUAL_POWER) -> float:
    """The power of the removed share with which the bound grows, by the two losses nearest to `level`.

    Where they do not tell, it is the `usual` one.
    """
    known = [loss for loss in losses if loss.bound > 0 and loss.share < 1]
    first = nearest(known, level) if known else None
    others = [loss for loss in known if first is not None and loss.share != first.share]
    if first is None or not others:
        return usual
    second = nearest(others, level)
    power = math.log(second.bound / first.bound) / math.log((1 - second.share) / (1 - first.share))
    return min(max(power, POWERS[0]), POWERS[1])
