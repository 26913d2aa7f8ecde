"""Groups of which all keep equally many channels are decided on together, in the name of the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from recoup.allocation.lagrangian import ErrorCurve
from recoup.channels.cost_model import CostModel
from recoup.channels.structure import Structure

# The groups of every series by the name of its first; a group of its own stands for itself.
Members: TypeAlias = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class TiedCosts:
    """What widths cost when all groups of a series have the same; no layer may read two of them."""

    costs: CostModel
    members: Members

    def total(self, counts: Mapping[str, int]) -> float:
        """The cost when the groups of every series keep so many channels."""
        return self.costs.total(spread(counts, self.members))

    def along(self, name: str, counts: Mapping[str, int]) -> Tensor:
        """The part of the cost that depends on one series, for every number of channels (width + 1,)."""
        whole = spread(counts, self.members)
        return torch.stack([self.costs.along(member, whole) for member in self.members[name]]).sum(dim=0)


def members_of(structure: Structure) -> Members:
    """The prunable groups, those of a series together."""
    return {unit[0].name: tuple(group.name for group in unit) for unit in structure.units}


def tied(curves: Mapping[str, ErrorCurve], members: Members) -> dict[str, ErrorCurve]:
    """One curve for every series: the errors of its groups add up, and no width is out of reach for any of them."""
    return {name: _sum([curves[member] for member in names]) for name, names in members.items()}


def spread(counts: Mapping[str, int], members: Members) -> dict[str, int]:
    """The channels of every group, given those of every series."""
    return {member: counts[name] for name, names in members.items() for member in names}


def _sum(curves: list[ErrorCurve]) -> ErrorCurve:
    errors = torch.stack([curve.errors for curve in curves]).sum(dim=0)
    least = max(curve.least for curve in curves)
    return replace(curves[0], errors=errors, least=least, most=max(least, min(curve.most for curve in curves)))
