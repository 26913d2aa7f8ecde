"""The share of the cost that an accuracy tolerance allows, found by recovering and measuring candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from recoup.judging.judge import Judge
from recoup.progress import Progress, silent
from recoup.search.binary import Search, Trial
from recoup.search.measured import Allocator

# Candidates that are recovered and measured on the way to a tolerance, and the share of the cost that is near enough.
CANDIDATES = 6
NEAR = 0.02
# Where better candidates follow: the share that is near enough for quick ones, how many follow, the share of the
# tolerance they aim at, and by how much they are better. A quick candidate that loses so much more is tried first.
ROUGH = 0.1
FULL_CANDIDATES = 2
AIM = 0.85
BOLDNESS = 1.4


def search_share(
    allocation: Allocator,
    candidate: Callable[[Tensor], nn.Module],
    judge: Judge,
    tolerance: float,
    progress: Progress = silent,
    near: float = NEAR,
) -> Search:
    """The smallest share of the cost whose candidate stays within the tolerance, with the judge's bound.

    The next share to try lies where the bound would meet the tolerance if its root grew evenly between the nearest
    candidates that passed and failed; after two that came out alike it is the middle.
    """
    whole = allocation.widths.structure.keep_all()
    passed, failed = Point(1.0, 0.0), Point(allocation.least, math.inf)
    found = Search(whole, judge.base, 0.0, ())
    for number in range(1, CANDIDATES + 1):
        if passed.share - failed.share < near:
            break
        is_stuck = len(found.trials) > 1 and found.trials[-1].accepted == found.trials[-2].accepted
        share = (passed.share + failed.share) / 2 if is_stuck else meeting(passed, failed, tolerance)
        keep = allocation.keep(share)
        verdict = judge(candidate(keep))
        trials = (*found.trials, Trial(("all groups",), share, verdict.bound, tolerance))
        if verdict.bound < tolerance:
            passed, found = Point(share, verdict.bound), Search(keep, judge.base, verdict.drop, trials)
        else:
            failed, found = Point(share, verdict.bound), replace(found, trials=trials)
        progress("search", number, CANDIDATES)
    return found


def press_on(
    allocation: Allocator,
    candidate: Callable[[Tensor], nn.Module],
    judge: Judge,
    tolerance: float,
    found: Search,
) -> Search:
    """What was `found` with quick candidates, taken further with better ones."""
    accepted = [trial for trial in found.trials if trial.accepted]
    if not accepted:
        return found
    passed, failed = Point(accepted[-1].share, accepted[-1].drop), None
    share = bolder_share(found.trials, BOLDNESS * tolerance) or passed.share
    for _ in range(FULL_CANDIDATES):
        keep = allocation.keep(share)
        verdict = judge(candidate(keep))
        here = Point(allocation.share(keep), verdict.bound)
        trial = Trial(("all groups, in full",), here.share, here.bound, tolerance)
        found = replace(found, trials=(*found.trials, trial))
        if trial.accepted:
            passed, found = here, replace(found, keep=keep, drop=verdict.drop)
        else:
            failed = here
        share = max(allocation.least, further(passed, failed, AIM * tolerance))
        if passed.share - share < NEAR:
            break
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """A share of the cost, and the points that may be lost there."""

    share: float
    bound: float


def meeting(passed: Point, failed: Point, level: float) -> float:
    """The share between two points at which the bound would be `level`; not too close to either."""
    if not math.isfinite(failed.bound):
        return (passed.share + failed.share) / 2
    start, end = math.sqrt(max(passed.bound, 0.0)), math.sqrt(max(failed.bound, 0.0))
    position = (math.sqrt(level) - start) / max(end - start, 1e-9)
    return passed.share - (passed.share - failed.share) * min(max(position, 0.15), 0.85)


def further(passed: Point, failed: Point | None, level: float) -> float:
    """The share at which the bound would be `level` if its root grew evenly; at most twice as far as what passed."""
    if failed is not None:
        return meeting(passed, failed, level)
    return 1 - (1 - passed.share) * math.sqrt(level / max(passed.bound, level / 4))


def bolder_share(trials: Sequence[Trial], level: float) -> float | None:
    """The share at which the bound would reach `level`, by the trials on both sides of it; None if none is beyond."""
    points = sorted((Point(trial.share, trial.drop) for trial in trials), key=lambda point: -point.share)
    below = [point for point in (Point(1.0, 0.0), *points) if point.bound < level]
    beyond = [point for point in points if point.bound >= level and point.share < below[-1].share]
    return meeting(below[-1], beyond[0], level) if beyond else None
