"""What is asked for: a tolerance on a measure, or a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recoup.batches import require_repeatable
from recoup.errors import UsageError
from recoup.evaluate import Evaluate, accuracy_on, checked
from recoup.settings import Budget, Settings


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """A tolerance in points, or a budget; what is measured is then only reported. `refine` is in seconds."""

    tolerance: float | None
    budget: Budget | None
    validation: Iterable[Any] | None
    evaluate: Evaluate | None
    refine: float
    settings: Settings

    def __post_init__(self) -> None:
        if (self.tolerance is None) == (self.budget is None):
            raise UsageError("give either a tolerance, in points, or a budget, such as Budget(macs=0.5), not both.")
        if self.tolerance is not None and not self.tolerance > 0:
            raise UsageError(
                f"tolerance must be above 0 points, got {self.tolerance}. For a fixed size ask for a budget."
            )
        if self.tolerance == math.inf:
            raise UsageError("a tolerance without end allows anything. For a fixed size ask for a budget.")
        if self.validation is not None and self.evaluate is not None:
            raise UsageError("give either validation= or evaluate=, not both.")
        if not 0 <= self.refine < math.inf:
            raise UsageError(f"refine must be a number of seconds, 0 or more, got {self.refine}.")
        if self.validation is not None:
            require_repeatable(self.validation, "validation")
        if self.settings.search == "binary" and self.budget is not None and self.budget.of == "latency":
            raise UsageError(
                "a latency budget needs widths that are measured, which these settings do not do: use preset='best' or "
                "'fast', or Settings(search='measured', selector='backward')."
            )
        if self.settings.search == "binary" and self.tolerance is not None and self.measure is None:
            raise UsageError(
                "a tolerance needs something to measure: pass validation=batches of (inputs, labels), or evaluate=fn. "
                "Without labels ask for a budget, or use preset='best', which can measure agreement with the original."
            )

    @property
    def measure(self) -> Evaluate | None:
        """A model's score in points, if the caller has said how to measure it."""
        if self.evaluate is not None:
            return checked(self.evaluate)
        return accuracy_on(self.validation) if self.validation is not None else None
