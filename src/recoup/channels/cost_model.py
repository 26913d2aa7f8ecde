"""What a network costs as a function of its widths: a sum of products of widths, one for each layer or tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from recoup.channels.structure import Structure
from recoup.labels.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A dim of a tensor: `fixed` of its indices always stay; group g, cut to n channels, leaves `kept[g][n]` more."""

    fixed: int
    kept: Mapping[str, Tensor]

    def width(self, counts: Mapping[str, int]) -> float:
        """How many indices are left when every group has so many channels."""
        return self.fixed + sum(float(kept[counts[name]]) for name, kept in self.kept.items())

    def along(self, group: str, counts: Mapping[str, int]) -> Tensor | float:
        """The same for every number of channels of one group (width + 1,), the others given."""
        if group not in self.kept:
            return self.width(counts)
        others = sum(float(kept[counts[name]]) for name, kept in self.kept.items() if name != group)
        return self.kept[group] + (self.fixed + others)


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """`factor` times the widths of its sides."""

    factor: float
    sides: tuple[Side, ...]

    def along(self, group: str, counts: Mapping[str, int]) -> Tensor:
        """The term for every number of channels of one group (width + 1,)."""
        value: Tensor | float = self.factor
        for side in self.sides:
            value = value * side.along(group, counts)
        assert isinstance(value, Tensor)
        return value


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    """The cost of a network whose groups keep the first channels of a given order each."""

    every: tuple[Term, ...]
    by_group: Mapping[str, tuple[Term, ...]]

    def total(self, counts: Mapping[str, int]) -> float:
        """The cost when every group keeps so many channels."""
        return sum(term.factor * math.prod(side.width(counts) for side in term.sides) for term in self.every)

    def along(self, group: str, counts: Mapping[str, int]) -> Tensor:
        """The part of the cost that depends on one group, for every number of its channels (width + 1,)."""
        parts = [term.along(group, counts) for term in self.by_group[group]]
        return torch.stack(parts).sum(dim=0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of an operation: `fixed` at any width, `scaled` in proportion to it; `reads` names what it reads."""

    fixed: float
    scaled: float
    reads: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """All of it, at full width."""
        return self.fixed + self.scaled


def macs_model(structure: Structure, orders: Mapping[str, Tensor]) -> CostModel:
    """Multiply-accumulates of layers and of what is none; `orders` (channel numbers, best first) by group."""
    sides = _Sides(structure, orders)
    terms = [sides.term(p.positions * p.kernel, p.weight, (0, 1)) for p in structure.products]
    terms += [sides.term_along(other.macs, *other.sides) for other in structure.others]
    return _terms(terms, orders)


def parameter_model(structure: Structure, orders: Mapping[str, Tensor], model: nn.Module) -> CostModel:
    """Number of parameters."""
    sides = _Sides(structure, orders)
    terms = [sides.term(1, name, range(parameter.dim())) for name, parameter in model.named_parameters()]
    return _terms(terms, orders)


def latency_model(
    structure: Structure, orders: Mapping[str, Tensor], timings: Mapping[str, Timing], layouts: Mapping[str, Any]
) -> CostModel:
    """Seconds of all operations, by node: `fixed`, and `scaled` with both widths of a layer's weight.

    What is no layer grows with the channels of the value it makes, or of one it reads, given their `layouts`.
    """
    sides = _Sides(structure, orders)
    weights = {product.node: product.weight for product in structure.products}
    terms = [Term(sum(timing.fixed for timing in timings.values()), ())]
    for node, timing in timings.items():
        if node in weights:
            elements = math.prod(structure.shapes[weights[node]][:2])
            terms.append(sides.term(timing.scaled / elements, weights[node], (0, 1)))
        else:
            found = (channels_in(layouts.get(name)) for name in (node, *timing.reads))
            terms.append(sides.term_along(timing.scaled, *islice((of for of in found if of is not None), 1)))
    return _terms(terms, orders)


def channels_in(layout: Any) -> Tensor | None:
    """The channel of every index along the dim that a value's channels lie along; for several values one by one."""
    if isinstance(layout, list):
        parts = [part for part in map(channels_in, layout) if part is not None]
        return torch.cat(parts) if parts else None
    return layout.channel_of if isinstance(layout, Layout) and layout.dim is not None else None


def _terms(terms: Sequence[Term], orders: Mapping[str, Tensor]) -> CostModel:
    by_group = {name: tuple(term for term in terms if any(name in side.kept for side in term.sides)) for name in orders}
    return CostModel(tuple(terms), by_group)


class _Sides:
    """Finds, for dims of tensors, what each group leaves of them."""

    def __init__(self, structure: Structure, orders: Mapping[str, Tensor]) -> None:
        self._structure, self._orders = structure, orders
        self._sites = {(site.tensor, site.dim): site.channel_of for site in structure.sites}
        self._groups = [group for group in structure.groups if group.name in orders]

    def term(self, factor: float, tensor: str, dims: Sequence[int]) -> Term:
        shape = self._structure.shapes.get(tensor, ())
        sides = []
        for dim in dims:
            if (tensor, dim) in self._sites:
                sides.append(self._side(self._sites[tensor, dim]))
            else:
                factor *= shape[dim]
        return Term(factor, tuple(sides))

    def term_along(self, whole: float, *dims: Tensor) -> Term:
        """What is `whole` at full width, and in proportion to what is left of `dims`, given by their channels."""
        return Term(whole / math.prod(map(len, dims)), tuple(map(self._side, dims)))

    def _side(self, channel_of: Tensor) -> Side:
        runs = len(channel_of) if channel_of.dim() == 2 else 1
        counts = torch.bincount(channel_of[channel_of >= 0], minlength=self._structure.width).double()
        kept = {}
        for group in self._groups:
            if bool(counts[group.channels].any()):
                along = counts[self._orders[group.name]].cumsum(0) / runs
                curve = torch.cat([along.new_zeros(1), along])
                kept[group.name] = curve[[group.rounded(count) for count in range(group.width + 1)]]
        inside = sum(float(curve[-1]) for curve in kept.values())
        return Side(channel_of.numel() // runs - round(inside), kept)
