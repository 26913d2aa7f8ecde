"""Recoveries by name on one calibration sample: those of one pass on any statistics, the others on those of `Best`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence

from torch import Tensor, nn

import recoup
from benchmarks.baselines import plan_without_refit
from benchmarks.networks import verified
from benchmarks.paper.workbench import Clock, Ranked, Sample

NONE, ONE_PASS = "none", "one-pass"
# Recoveries that need no more than the statistics of one pass, and those that hold images out to judge by.
IN_ONE_PASS = (NONE, "mean-shift", "batch-norm", ONE_PASS, "rescale")
SEQUENTIAL = ("in-sequence", "joint", "refined")
SMOKE = (NONE, ONE_PASS)
HAS_NAMES = "recovery" in inspect.signature(recoup.recover).parameters


def recoveries_of(options: argparse.Namespace) -> Sequence[str]:
    """Names of recoveries: those that the command line says, or all that are there."""
    if options.recoveries:
        return list(options.recoveries)
    return SMOKE if options.smoke or not HAS_NAMES else (*IN_ONE_PASS, *SEQUENTIAL)


def recovered(sample: Sample, ranked: Ranked, keep: Tensor, recovery: str, clock: Clock) -> nn.Module:
    """The smaller network that a recovery makes of what `keep` leaves; the clock gets the seconds of all it takes."""
    seen = ranked.seen
    if recovery in SEQUENTIAL:
        seen, statistics = sample.calibrated(recoup.Best(seed=sample.seed))
        clock.seconds |= statistics.seconds
        clock.memory |= statistics.memory
    if recovery == NONE and not HAS_NAMES:
        return clock("recovery", lambda: recoup.apply(seen.model, plan_without_refit(seen.structure, keep)))
    return clock("recovery", lambda: verified(seen, plan_of(seen, keep, recovery)))


def plan_of(seen: recoup.Calibration, keep: Tensor, recovery: str) -> recoup.Plan:
    """The plan of the recovery of that name."""
    if HAS_NAMES:
        named = {"recovery": recovery}
        recover: Callable[..., recoup.Recovered] = recoup.recover
        return recover(seen, keep, **named).plan
    return recoup.recover(seen, keep).plan
