"""The loop for a tolerance: propose, recover, judge, until the strategy is content.

A strategy is a generator: it yields proposals and is sent what was measured of each. `allocation.binary` is the
paper's, layer by layer; `allocation.shares` moves along one share of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

from torch import nn

from recoup.allocation.goal import Proposal, Search
from recoup.errors import RecoupError, VerificationError
from recoup.judge.acceptance import Acceptance, Verdict
from recoup.recovery.choose import Recovered
from recoup.statistics.calibrate import Calibration
from recoup.surgery.apply import apply

Strategy: TypeAlias = Generator[Proposal, Verdict, object]
Recover: TypeAlias = Callable[[Proposal], Recovered]


def search_within(calibration: Calibration, strategy: Strategy, recover: Recover, start: Search) -> Search:
    """The smallest candidate that the strategy proposes and the acceptance lets pass; the `start` if none does."""
    found = start
    proposal = next(strategy, None)
    while proposal is not None:
        recovered = recover(proposal)
        verdict = judged(found.acceptance, apply(calibration.model, recovered.plan))
        found = found.after(proposal, verdict, recovered)
        try:
            proposal = strategy.send(verdict)
        except StopIteration:
            proposal = None
    return found


def judged(acceptance: Acceptance, candidate: nn.Module) -> Verdict:
    """What the acceptance says of a candidate.

    Raises:
        VerificationError: the candidate cannot be run, or the caller's measure fails on it.
    """
    try:
        return acceptance(candidate)
    except RecoupError:
        raise
    except RuntimeError as error:  # raised by torch inside the candidate, or by the caller's measure
        raise VerificationError(
            f"a candidate could not be measured ({str(error)[:200]}). If your measure runs on the original model, "
            "please report the model: its code depends on sizes in a way that was not seen."
        ) from error
