"""The loop for a tolerance: propose, recover, judge, until the strategy is content.

A strategy is a generator: it yields proposals and is sent what was measured of each. `allocation.binary` is the
paper's, layer by layer; `allocation.shares` moves along one share of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

from recoup.allocation.goal import Proposal, Search
from recoup.judge.acceptance import Verdict, judged
from recoup.recovery.choose import Recovered
from recoup.statistics.calibrate import Calibration
from recoup.surgery.apply import apply

Strategy: TypeAlias = Generator[Proposal, Verdict, object]
Recover: TypeAlias = Callable[[Proposal], Recovered]


def search_within(calibration: Calibration, strategy: Strategy, recover: Recover, start: Search) -> Search:
    """The smallest candidate that the strategy proposes and the acceptance lets pass; the `start` if none does."""
    found, known = start, dict[tuple[bytes, bool], Verdict]()
    proposal = next(strategy, None)
    while proposal is not None:
        key = proposal.keep.numpy().tobytes(), proposal.in_full
        recovered = None if key in known else recover(proposal)  # one that is proposed again is told what it was told
        if recovered is not None:
            known[key] = judged(found.acceptance, apply(calibration.model, recovered.plan))
        verdict = known[key]
        found = found.after(proposal, verdict, recovered)
        try:
            proposal = strategy.send(verdict)
        except StopIteration:
            proposal = None
    return found
