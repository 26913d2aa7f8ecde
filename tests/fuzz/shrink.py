"""The smallest case that still breaks the same law."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.fuzz.laws import Outcome
from tests.fuzz.networks import Case, runs, simpler

# Seconds for one failure; what is found by then is small enough to read.
PATIENCE = 90.0


def shrink(case: Case, law: str, check: Callable[[Case], Outcome], patience: float = PATIENCE) -> Case:
    """`case` with everything left out or put back to its simplest that `law` can be broken without."""
    end = time.monotonic() + patience
    best = case
    while (less := _smaller(best, law, check, end)) is not None:
        best = less
    return best


def _smaller(case: Case, law: str, check: Callable[[Case], Outcome], end: float) -> Case | None:
    for less in simpler(case):
        if time.monotonic() > end:
            return None
        if runs(less) and law in check(less).broken:
            return less
    return None
