"""The share of the cost that an accuracy tolerance allows, found by recovering and measuring candidates.

What a candidate loses grows with a power of the share that is removed, the third or the fifth in most networks. Two
candidates tell the power, and so where the next one should lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor, nn

from recoup.judging.judge import Judge, Verdict
from recoup.progress import Progress, silent
from recoup.search.binary import Search, Trial
from recoup.search.measured import Allocator

# Candidates that are recovered and measured on the way to a tolerance, and the share of the cost that is near enough.
CANDIDATES = 6
NEAR = 0.02
# Where better candidates follow, quick ones only look for where to begin: where so many times the tolerance would be
# lost. They end when the share, or the loss relative to that, is near enough.
BOLDNESS = 1.7
ROUGH = 0.1
CLOSE = 0.2
# How many better ones there may be until one passes, and the share of the tolerance they aim at. After a first one that
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

Candidate: TypeAlias = Callable[[Tensor], nn.Module]


@dataclass(frozen=True, slots=True)
class Point:
    """A share of the cost, and the points that may be lost there."""

    share: float
    bound: float

    def along(self, power: float, level: float) -> float:
        """The share at which the bound would be `level` if it grew with a power of what is removed."""
        return 1 - (1 - self.share) * math.pow(level / max(self.bound, level / FAR), 1 / power)


def search_share(
    allocation: Allocator, candidate: Candidate, judge: Judge, tolerance: float, progress: Progress = silent
) -> Search:
    """The smallest share of the cost whose candidate stays within the tolerance, with the judge's bound."""
    found = Search(allocation.widths.structure.keep_all(), judge.base, 0.0, ())
    for keep, share, verdict in narrowing(allocation, candidate, judge, tolerance, NEAR, progress=progress):
        found = _with_trial(found, Trial(QUICK, share, verdict.bound, tolerance), keep, verdict)
    return found


def search_in_full(
    allocation: Allocator,
    quick: Candidate,
    full: Candidate,
    judge: Judge,
    tolerance: float,
    progress: Progress = silent,
) -> tuple[Search, bool]:
    """The same with two kinds of candidates, and whether the answer is a full one.

    A few `quick` ones find the place for a `full` one. There is a second if the first fails or leaves much to gain, and
    a third if both fail; then the answer is the best quick one that passes.
    """
    bold, aim = BOLDNESS * tolerance, AIM * tolerance
    found, is_full = Search(allocation.widths.structure.keep_all(), judge.base, 0.0, ()), False
    for keep, share, verdict in narrowing(allocation, quick, judge, bold, ROUGH, CLOSE, progress):
        found = _with_trial(found, Trial(QUICK, share, verdict.bound, tolerance), keep, verdict)
    points, least = _points(found, QUICK), allocation.least
    most = min((trial.share for trial in found.trials if trial.accepted), default=1 - NEAR)
    power = power_of(points, bold)
    share = nearest(points, bold).along(power, bold) if points else least
    tried: list[Tensor] = []
    while len(tried) < (2 if is_full else FULL_CANDIDATES):
        share = min(max(share, least), most)
        fresh = _fresh(allocation, share, share if is_full else most, tried)
        if fresh is None:
            break
        verdict = judge(full(fresh))
        here = Point(allocation.share(fresh), verdict.bound)
        found = _with_trial(found, Trial(FULL, here.share, here.bound, tolerance), fresh, verdict)
        tried, is_full = [*tried, fresh], is_full or found.keep is fresh
        share = here.along(power_of(_points(found, FULL), aim, power), aim)
        if here.bound < tolerance and here.share - max(share, least) < PROMISING * here.share:
            break
    if any(trial.accepted for trial in found.trials):
        return found, is_full
    settled = search_share(allocation, quick, judge, tolerance, progress)
    return replace(settled, trials=(*found.trials, *settled.trials)), False


def _points(found: Search, kind: tuple[str, ...]) -> list[Point]:
    """What the candidates of one kind cost and may lose."""
    return [Point(trial.share, trial.drop) for trial in found.trials if trial.groups == kind]


def _fresh(allocation: Allocator, share: float, most: float, tried: Sequence[Tensor]) -> Tensor | None:
    """The mask for a share, or for the next one up to `most` that has a mask not tried yet; None if there is none."""
    keep = allocation.keep(share)
    while any(bool((keep == mask).all()) for mask in tried):
        if share >= most:
            return None
        share = min(share + NEAR, most)
        keep = allocation.keep(share)
    return keep


def narrowing(
    allocation: Allocator,
    candidate: Candidate,
    judge: Judge,
    level: float,
    near: float,
    close: float = 0.0,
    progress: Progress = silent,
) -> Iterator[tuple[Tensor, float, Verdict]]:
    """Masks with their shares and verdicts, towards the share at which the bound is `level`.

    The next share to try lies where the bound would meet the level if its root grew evenly between the nearest
    candidates below and above; after two that came out alike it is the middle. It ends when those are `near` each
    other, or a bound is `close` to the level.
    """
    below, above = Point(1.0, 0.0), Point(allocation.least, math.inf)
    sides: list[bool] = []
    for number in range(1, CANDIDATES + 1):
        if below.share - above.share < near:
            return
        is_stuck = len(sides) > 1 and sides[-1] == sides[-2]
        share = (below.share + above.share) / 2 if is_stuck else meeting(below, above, level)
        keep = allocation.keep(share)
        verdict = judge(candidate(keep))
        progress("search", number, CANDIDATES)
        yield keep, allocation.share(keep), verdict
        here = Point(share, verdict.bound)
        if abs(here.bound - level) < close * level:
            return
        sides.append(here.bound < level)
        below, above = (here, above) if sides[-1] else (below, here)


def meeting(below: Point, above: Point, level: float) -> float:
    """The share between two points at which the bound would be `level`; not too close to either."""
    if not math.isfinite(above.bound):
        return (below.share + above.share) / 2
    start, end = math.sqrt(max(below.bound, 0.0)), math.sqrt(max(above.bound, 0.0))
    position = (math.sqrt(level) - start) / max(end - start, 1e-9)
    return below.share - (below.share - above.share) * min(max(position, 0.15), 0.85)


def nearest(points: Sequence[Point], level: float) -> Point:
    """The point whose bound is nearest to `level`, by their ratio."""
    return min(points, key=lambda point: abs(math.log(max(point.bound, level / FAR) / level)))


def power_of(points: Sequence[Point], level: float, usual: float = USUAL_POWER) -> float:
    """The power of the removed share with which the bound grows, by the two points nearest to `level`.

    Where they do not tell, it is the `usual` one.
    """
    known = [point for point in points if point.bound > 0 and point.share < 1]
    first = nearest(known, level) if known else None
    others = [point for point in known if first is not None and point.share != first.share]
    if first is None or not others:
        return usual
    second = nearest(others, level)
    power = math.log(second.bound / first.bound) / math.log((1 - second.share) / (1 - first.share))
    return min(max(power, POWERS[0]), POWERS[1])


def _with_trial(found: Search, trial: Trial, keep: Tensor, verdict: Verdict) -> Search:
    """The search with one more trial, whose mask is its answer if it passed and none that did has a smaller share."""
    found = replace(found, trials=(*found.trials, trial))
    if trial.accepted and trial.share <= min(other.share for other in found.trials if other.accepted):
        return replace(found, keep=keep, drop=verdict.drop)
    return found
