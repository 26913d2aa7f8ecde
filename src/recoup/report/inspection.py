"""The dry run: what a network consists of, what could be pruned, what is locked and why."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.channels.cost import Cost, cost, macs_by_product
from recoup.channels.structure import Structure
from recoup.report.content import GroupRow, group_rows
from recoup.report.formatting import short
from recoup.report.picture import draw, save_picture

COLUMNS = 80
NAME_WIDTH = 20
_HEAD = "  each group: its channels, MACs, parameters, and whether they may go"
# What a reason says, and what a user can change about it.
ADVICE = (
    ("is not understood", "Write it with other operations, or add a rule for it (CONTRIBUTING.md)"),
    ("writes into a part of it", "Write it out of place"),
    ("breaks the model's own code", "Take sizes from tensors, or do without keep_class=True"),
    ("depends on the values of a tensor", "Move that part out of the model"),
    ("multiplies by a weight that depends", "Let a layer multiply instead"),
)


@dataclass(frozen=True, slots=True)
class InspectedGroup:
    """A group, what it takes to make its channels, and what part of the whole network that is.

    `macs` and `parameters` are those of every layer, norm and vector whose outputs are the group's channels; a tensor
    that holds channels of several groups, such as a norm behind a concatenation, counts for each with its own part.
    """

    row: GroupRow
    macs: int
    parameters: int
    macs_share: float
    parameters_share: float


@dataclass(frozen=True, slots=True)
class InspectedOperation:
    """What an operation of a module multiplies that is no layer; `is_fixed` if nothing that is pruned shrinks it."""

    site: str
    macs: int
    macs_share: float
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """A layer reads the channels of group `source` and makes those of group `target`."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """Cost and groups of a network, and how they hang together.

    `least` is the cost with every group cut to its locked channels, or to one channel where a layer would have none.
    `inputs` names groups with a layer that reads no group: it reads the network's input, or what an operation that
    is not followed made of it. `outputs` names groups that the model returns. `operations` multiply and are no layers.
    """

    network: str
    cost: Cost
    least: Cost
    groups: tuple[InspectedGroup, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operations: tuple[InspectedOperation, ...] = ()

    @property
    def prunable(self) -> int:
        """Number of groups with at least one channel that may go."""
        return sum(group.row.locked < group.row.before for group in self.groups)

    @property
    def macs_locked(self) -> float:
        """Share of the multiply-accumulates that stays whatever is pruned."""
        return _part(self.least.macs, self.cost.macs)

    @property
    def parameters_locked(self) -> float:
        """Share of the parameters that stays whatever is pruned."""
        return _part(self.least.parameters, self.cost.parameters)

    @property
    def prospect(self) -> str:
        """How much there is to prune, in a line."""
        return (
            f"{self.prunable} of {len(self.groups)} groups prunable; {self.macs_locked:.1%} of the MACs and "
            f"{self.parameters_locked:.1%} of the parameters stay whatever is pruned"
        )

    @property
    def summary(self) -> str:
        """The whole network in a line."""
        cost = self.cost
        costs = f"{cost.macs:,} MACs, {cost.flops:,} FLOPs, {cost.parameters:,} parameters"
        return f"{self.network}: {costs}, {self.prospect}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        shares = {"macs_locked": self.macs_locked, "parameters_locked": self.parameters_locked}
        costs = {"cost": self.cost.to_json(), "least": self.least.to_json()}
        return {**dataclasses.asdict(self), **costs, "prunable": self.prunable, **shares}

    def save_picture(self, path: str | Path) -> Path:
        """Write the groups as a drawing into a new SVG file.

        Raises:
            ArtefactError: the file exists or cannot be written.
            UsageError: its name does not end in .svg.
        """
        return save_picture(draw(self), path)

    def __str__(self) -> str:
        """Lines of at most 80 columns, but for long names: every group, what is in no layer, each reason once."""
        reasons = list(dict.fromkeys(reason for group in self.groups for reason in group.row.reasons))
        width = min(NAME_WIDTH, max((len(group.row.name) for group in self.groups), default=0))
        lines = [_HEAD] if self.groups else []
        lines += [line for group in self.groups for line in _lines(group, width, reasons)]
        operations = [line for operation in self.operations for line in _wrapped(_operation_line(operation), "  ")]
        why = [line for number, reason in enumerate(reasons, start=1) for line in _reason_lines(number, reason)]
        return "\n".join([*_wrapped(self.summary, ""), *lines, *operations, *why])

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return draw(self)


def inspect_structure(model: nn.Module, structure: Structure) -> Inspection:
    """The inspection of a traced model."""
    rows, whole = group_rows(structure), cost(structure, model)
    return Inspection(
        network=type(model).__name__,
        cost=whole,
        least=cost(structure, model, _least(structure)),
        groups=_groups(structure, model, rows, whole),
        edges=_edges(rows),
        inputs=_inputs(rows),
        outputs=tuple(group.name for group in structure.groups if group.returned),
        operations=_operations(structure, whole),
    )


def _lines(group: InspectedGroup, width: int, reasons: list[str]) -> list[str]:
    """What a group is and costs; a name that is too long has a line of its own."""
    row = group.row
    locked = "locked" if row.locked == row.before else f"{row.locked} locked" if row.locked else "free"
    marks = ", ".join(str(1 + reasons.index(reason)) for reason in row.reasons)
    costs = (
        f"{short(group.macs):>6} ({group.macs_share:6.1%}) {short(group.parameters):>6} ({group.parameters_share:6.1%})"
    )
    rest = f" {row.before:>5} {costs}  {locked}{f' [{marks}]' if marks else ''}"
    if len(row.name) > width:
        return [f"  {row.name}", f"  {'':<{width}}{rest}"]
    return [f"  {row.name:<{width}}{rest}"]


def _reason_lines(number: int, reason: str) -> list[str]:
    advice = next((advice for said, advice in ADVICE if said in reason), "")
    return _wrapped(f"[{number}] {reason}.{f' {advice}' if advice else ''}", "  ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _operation_line(operation: InspectedOperation) -> str:
    state = "stays whatever is pruned" if operation.is_fixed else "shrinks with what it reads"
    return f"in no layer: {operation.site}, {operation.macs:,} MACs ({operation.macs_share:.1%}), {state}"


def _operations(structure: Structure, whole: Cost) -> tuple[InspectedOperation, ...]:
    """One for every operation of a module, and for what of it stays; the largest first."""
    macs: dict[tuple[str, bool], int] = {}
    for other in structure.others:
        key = other.site, not other.sides
        macs[key] = macs.get(key, 0) + other.macs
    found = sorted(macs.items(), key=lambda item: -item[1])
    return tuple(InspectedOperation(site, n, _part(n, whole.macs), is_fixed) for (site, is_fixed), n in found)


def _least(structure: Structure) -> Tensor:
    """The mask that keeps what is locked, and one channel wherever a layer would be left without any."""
    keep = structure.keep_all()
    for group in structure.groups:
        keep[group.channels] = group.locked
    return structure.refill(keep, torch.arange(structure.width))


def _groups(
    structure: Structure, model: nn.Module, rows: tuple[GroupRow, ...], whole: Cost
) -> tuple[InspectedGroup, ...]:
    macs, parameters = _macs_by_channel(structure), _parameters_by_channel(structure, model)
    found = []
    for row, group in zip(rows, structure.groups, strict=True):
        own = Cost(int(macs[group.channels].sum()), int(parameters[group.channels].sum()))
        shares = _part(own.macs, whole.macs), _part(own.parameters, whole.parameters)
        found.append(InspectedGroup(row, own.macs, own.parameters, *shares))
    return tuple(found)


def _macs_by_channel(structure: Structure) -> Tensor:
    """Multiply-accumulates that make each channel (width,)."""
    macs = macs_by_product(structure, structure.keep_all())
    return _by_channel(structure, ((product.weight, macs[product]) for product in structure.products))


def _parameters_by_channel(structure: Structure, model: nn.Module) -> Tensor:
    """Parameters that make each channel (width,)."""
    return _by_channel(structure, ((name, parameter.numel()) for name, parameter in model.named_parameters()))


def _by_channel(structure: Structure, amounts: Iterable[tuple[str, int]]) -> Tensor:
    """The amount of each tensor, divided evenly among its indices and added up by the channel they make (width,)."""
    made_by = _made_by(structure)
    total = torch.zeros(structure.width, dtype=torch.long)
    for name, amount in amounts:
        if name in made_by:
            made = made_by[name][made_by[name] >= 0]
            total.index_add_(0, made, torch.full_like(made, amount // max(1, len(made_by[name]))))
    return total


def _made_by(structure: Structure) -> dict[str, Tensor]:
    """For every tensor, the channel that each index along its outputs makes; what is no layer's weight has one dim."""
    outputs = {product.weight: product.output_dim for product in structure.products}
    sites = sorted(structure.sites, key=lambda site: site.dim == outputs.get(site.tensor))
    return {site.tensor: site.channel_of.flatten() for site in sites}


def _edges(rows: tuple[GroupRow, ...]) -> tuple[Edge, ...]:
    made_in = {producer: row.name for row in rows for producer in row.producers}
    found = (Edge(row.name, made_in[reader]) for row in rows for reader in row.consumers if reader in made_in)
    return tuple(dict.fromkeys(found))


def _inputs(rows: tuple[GroupRow, ...]) -> tuple[str, ...]:
    readers = {reader for row in rows for reader in row.consumers}
    return tuple(row.name for row in rows if not readers.issuperset(row.producers))


def _part(amount: int, whole: int) -> float:
    return amount / whole if whole else 0.0
