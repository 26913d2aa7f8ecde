"""What is asked for, and what is found: a goal goes in, an allocation comes out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from recoup.allocation.latency import Latency
from recoup.config import Budget, Limits, is_number, plain_number
from recoup.errors import UsageError, require_kind, shown
from recoup.inputs.batches import require_repeatable
from recoup.judge.acceptance import Acceptance, Verdict
from recoup.judge.accuracy import Evaluate
from recoup.recovery.choose import Recovered


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """A tolerance in points, or a budget, or widths by hand alone; what is measured is otherwise only reported.

    `validation` are batches to measure on, `evaluate` is a measure in their place. `widths` fixes groups by name,
    `min_width` is the fewest channels that any other group keeps.
    """

    tolerance: float | None = None
    budget: Budget | None = None
    validation: Iterable[Any] | None = None
    evaluate: Evaluate | None = None
    widths: Mapping[str, int] = field(default_factory=dict)
    min_width: int = 1

    def __post_init__(self) -> None:
        Limits(self.widths, self.min_width)
        asked = (self.tolerance is not None) + (self.budget is not None)
        if asked > 1 or not (asked or self.widths):
            raise UsageError(
                "give either a tolerance, in points, or a budget, such as Budget(macs=0.5), not both. Widths by hand, "
                "such as widths={'conv1': 48}, may stand alone."
            )
        if self.tolerance is not None:
            _require_points(self.tolerance)
            object.__setattr__(self, "tolerance", plain_number(self.tolerance))
        if self.budget is not None:
            require_kind("budget", self.budget, Budget, "a Budget, such as recoup.Budget(macs=0.5)")
        if self.evaluate is not None and (isinstance(self.evaluate, nn.Module) or not callable(self.evaluate)):
            raise UsageError(f"evaluate must be a function from a model to points, got {shown(self.evaluate)}.")
        if self.validation is not None and self.evaluate is not None:
            raise UsageError("give either validation= or evaluate=, not both.")
        if self.validation is not None:
            require_repeatable(self.validation, "validation")


def _require_points(tolerance: Any) -> None:
    if not is_number(tolerance):
        raise UsageError(f"tolerance must be a number of points, got {shown(tolerance)}.")
    if not tolerance > 0:
        raise UsageError(f"tolerance must be above 0 points, got {tolerance}. For a fixed size ask for a budget.")
    if tolerance == math.inf:
        raise UsageError("a tolerance without end allows anything. For a fixed size ask for a budget.")


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement: these groups at this share kept, the drop it gave and the drop allowed."""

    groups: tuple[str, ...]
    share: float
    drop: float
    allowed: float

    @property
    def accepted(self) -> bool:
        """Whether the drop stayed below what was allowed."""
        return self.drop < self.allowed


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A candidate that a strategy wants to be recovered and measured.

    `size` says how large it is: of the candidates that pass, the smallest is the answer. It is recovered `in_full`, or
    quickly, where the method knows both.
    """

    keep: Tensor
    groups: tuple[str, ...]
    share: float
    allowed: float
    size: float
    in_full: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """The mask found, its recovery, the drop there, and every measurement on the way; `acceptance` is what measured."""

    keep: Tensor
    acceptance: Acceptance
    tolerance: float
    drop: float = 0.0
    bound: float = 0.0
    top5: float | None = None
    size: float = math.inf
    recovered: Recovered | None = None
    trials: tuple[Trial, ...] = ()

    def after(self, proposal: Proposal, verdict: Verdict, recovered: Recovered | None) -> Search:
        """The search with one more trial, whose mask is its answer if it passed and none that did is smaller.

        A proposal that was recovered before has no recovery now: it has had its chance.
        """
        trial = Trial(proposal.groups, proposal.share, verdict.bound, proposal.allowed)
        found = replace(self, trials=(*self.trials, trial))
        if recovered is None or not trial.accepted or proposal.size > self.size:
            return found
        return replace(
            found,
            keep=proposal.keep,
            drop=verdict.drop,
            bound=verdict.bound,
            top5=verdict.top5,
            size=proposal.size,
            recovered=recovered,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The mask over all channels that was decided on.

    `search` is there where a tolerance was searched for, `latency` where networks were timed for a budget of time.
    """

    keep: Tensor
    search: Search | None = None
    latency: Latency | None = None

    @property
    def recovered(self) -> Recovered | None:
        """What the search has recovered already of the answer."""
        return None if self.search is None else self.search.recovered
