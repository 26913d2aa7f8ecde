"""The paper's binary structural search with step constraint, as a strategy.

Visit i = 1..L units (residual blocks, or layers) in order. Unit i may bring the accuracy drop to τ_i = τ · i / L (step
constraint) or τ (global). Bisect its sparsity in [0, 1) for k steps: prune and compensate at the midpoint, measure;
a drop of τ_i or more lowers the upper end, less raises the lower end, whose channels are kept in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Literal, Protocol

import torch
from torch import Tensor

from recoup.allocation.goal import Proposal
from recoup.allocation.widths import Widths
from recoup.errors import LockedError
from recoup.judge.acceptance import Verdict
from recoup.progress import Progress, silent
from recoup.tracing.trace import Traced

Constraint = Literal["step", "global"]
Order = Literal["bottom-up", "top-down", "random"]
Unit = Literal["block", "layer"]
NOTHING_LEFT = (
    "there is nothing to prune: all that can be is read by the layers of the classifier, which the paper leaves alone. "
    "Use Paper(classifier=True), or give widths by hand."
)

OUTSIDE = (
    "there is nothing to prune: all that may be lies outside of the residual blocks, which the paper's search visits. "
    "Use Paper(unit='layer'), or give widths by hand."
)


class BinarySettings(Protocol):
    """What the search can be told; the fields of `recoup.Paper`."""

    @property
    def steps(self) -> int: ...  # noqa: D102 - described in recoup.Paper

    @property
    def constraint(self) -> Constraint: ...  # noqa: D102

    @property
    def order(self) -> Order: ...  # noqa: D102

    @property
    def unit(self) -> Unit: ...  # noqa: D102

    @property
    def classifier(self) -> bool: ...  # noqa: D102

    @property
    def seed(self) -> int: ...  # noqa: D102


def bisections(
    traced: Traced, widths: Widths, settings: BinarySettings, tolerance: float, progress: Progress = silent
) -> Generator[Proposal, Verdict, None]:
    """Candidates of the search, unit after unit."""
    units = visiting_order(traced, settings, widths.limits.widths)
    if not units and widths.limits.widths:
        return
    if not units:
        raise LockedError(OUTSIDE if _open_groups(traced, settings, ()) else NOTHING_LEFT)
    widths = yield from _without_constants(widths, tolerance / len(units))
    keep = widths.start()
    for i, unit in enumerate(units, start=1):
        allowed = tolerance * (i / len(units) if settings.constraint == "step" else 1.0)
        keep = yield from _bisected(unit, widths, keep, allowed, settings.steps)
        progress("search", i * settings.steps, len(units) * settings.steps)


def visiting_order(traced: Traced, settings: BinarySettings, by_hand: Collection[str] = ()) -> list[tuple[str, ...]]:
    """The units to visit, as names of groups; those whose width is given by hand are left out.

    By "block", what lies outside of all residual blocks stays whole; a network without any is visited by layer.
    """
    prunable = _open_groups(traced, settings, by_hand)
    by_block = settings.unit == "block" and traced.blocks
    blocks = traced.blocks if by_block else tuple((name,) for name in prunable)
    units = [tuple(name for name in block if name in prunable) for block in blocks]
    return _ordered([unit for unit in units if unit], settings)


def _open_groups(traced: Traced, settings: BinarySettings, by_hand: Collection[str]) -> list[str]:
    """Names of the groups that the search may change, wherever they lie."""
    spared = {*by_hand, *spared_groups(traced, settings)}
    return [group.name for group in traced.structure.prunable if group.name not in spared]


def spared_groups(traced: Traced, settings: BinarySettings) -> frozenset[str]:
    """Names of the groups that the layers of the classifier read, where these are left alone."""
    return frozenset() if settings.classifier else frozenset(traced.head)


def _without_constants(widths: Widths, allowed: float) -> Generator[Proposal, Verdict, Widths]:
    """Widths without constant channels if that costs nothing to speak of, otherwise with all of them."""
    fewer = widths.without_constants()
    live = fewer.start()
    if torch.equal(live, widths.start()):
        return widths
    verdict = yield Proposal(live, ("constant channels",), 0.0, allowed, float(live.sum()))
    return fewer if verdict.bound < allowed else widths


def _bisected(
    unit: tuple[str, ...], widths: Widths, keep: Tensor, allowed: float, steps: int
) -> Generator[Proposal, Verdict, Tensor]:
    """The best mask for a unit."""
    groups = tuple(widths.structure.group(name) for name in unit)
    low, high = 0.0, 1.0
    best = keep
    for _ in range(steps):
        sparsity = (low + high) / 2
        candidate = widths.keep(groups, 1 - sparsity, keep)
        verdict = yield Proposal(candidate, unit, 1 - sparsity, allowed, float(candidate.sum()))
        if verdict.bound < allowed:
            low, best = sparsity, candidate
        else:
            high = sparsity
    return best


def _ordered(units: list[tuple[str, ...]], settings: BinarySettings) -> list[tuple[str, ...]]:
    if settings.order == "top-down":
        return units[::-1]
    if settings.order == "random":
        generator = torch.Generator().manual_seed(settings.seed)
        return [units[i] for i in torch.randperm(len(units), generator=generator).tolist()]
    return units
