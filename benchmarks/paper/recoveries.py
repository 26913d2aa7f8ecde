"""Recoveries by name on one calibration sample: those of one pass on any statistics, the others on those of `Best`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import Tensor, nn

import recoup
from benchmarks.networks import verified
from benchmarks.paper.workbench import Clock, Ranked, Sample
from recoup.recovery.registry import ONE_PASS_FAMILY, RECOVERIES

NONE, ONE_PASS = "none", "one-pass"
# The stage of statistics that hold images out, beside those that a selector ranked by.
HELD_OUT = "held-out statistics"
# Recoveries that need no more than the statistics of one pass, and those that hold images out to judge by.
IN_ONE_PASS = tuple(ONE_PASS_FAMILY)
SEQUENTIAL = tuple(name for name in RECOVERIES if name not in ONE_PASS_FAMILY)
SMOKE = (NONE, ONE_PASS)


def recoveries_of(options: argparse.Namespace) -> Sequence[str]:
    """Names of recoveries: those that the command line says, or all that are there."""
    if options.recoveries:
        return list(options.recoveries)
    return SMOKE if options.smoke else (*IN_ONE_PASS, *SEQUENTIAL)


def recovered(sample: Sample, ranked: Ranked, keep: Tensor, recovery: str, clock: Clock) -> nn.Module:
    """The smaller network that a recovery makes of what `keep` leaves; the clock gets the seconds of all it takes."""
    seen = ranked.seen
    if recovery in SEQUENTIAL:
        seen, statistics = sample.calibrated(recoup.Best(seed=sample.seed))
        clock.seconds[HELD_OUT] = statistics.seconds["statistics"]
        if "statistics" in statistics.memory:
            clock.memory[HELD_OUT] = statistics.memory["statistics"]
    return clock("recovery", lambda: verified(seen, plan_of(seen, keep, recovery)))


def plan_of(seen: recoup.Calibration, keep: Tensor, recovery: str) -> recoup.Plan:
    """The plan of the recovery of that name."""
    return recoup.recover(seen, keep, recovery=recovery).plan
