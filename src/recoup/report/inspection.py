"""The dry run: what a network consists of, what could be pruned, what is locked and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from recoup.report.content import GroupRow, group_rows
from recoup.structure.cost import Cost, cost, macs_by_call
from recoup.structure.groups import Structure


@dataclass(frozen=True, slots=True)
class InspectedGroup:
    """A group, and the multiply-accumulates of the layers that make it."""

    row: GroupRow
    macs: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Cost and groups of a network."""

    network: str
    cost: Cost
    groups: tuple[InspectedGroup, ...]

    @property
    def prunable(self) -> int:
        """Number of groups with at least one channel that may go."""
        return sum(group.row.locked < group.row.before for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {**dataclasses.asdict(self), "prunable": self.prunable}

    def __str__(self) -> str:
        head = f"{self.network}: {self.cost.macs:,} MACs, {self.cost.parameters:,} parameters, "
        lines = [head + f"{self.prunable} of {len(self.groups)} groups prunable"]
        width = max((len(group.row.name) for group in self.groups), default=0)
        for group in self.groups:
            state = f"{group.row.locked} locked: {'; '.join(group.row.reasons)}" if group.row.locked else "free"
            lines.append(
                f"  {group.row.name:<{width}}  {group.row.before:>5} channels  {group.macs:>14,} MACs  {state}"
            )
        return "\n".join(lines)


def inspect_structure(model: nn.Module, structure: Structure) -> Inspection:
    """The inspection of a traced model."""
    macs = macs_by_call(structure, structure.keep_all())
    by_layer: dict[str, int] = {}
    for product in structure.products:
        layer = product.weight.removesuffix(".weight")
        by_layer[layer] = by_layer.get(layer, 0) + macs[product.node]
    groups = tuple(
        InspectedGroup(row, sum(by_layer.get(producer, 0) for producer in row.producers))
        for row in group_rows(structure)
    )
    return Inspection(type(model).__name__, cost(structure, model), groups)
