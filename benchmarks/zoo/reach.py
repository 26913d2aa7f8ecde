"""What a network's structure allows: how far its MACs can go down, and what is locked by what."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.zoo.rows import Locks, Reason
from recoup.algebra.selection import Ranking
from recoup.allocation.widths import Widths
from recoup.channels.cost import cost, macs_by_product
from recoup.channels.structure import Group, Structure
from recoup.tracing.trace import Traced

REASONS_SHOWN = 3
NUMBER = re.compile(r"(?<![A-Za-z])\d+(\.\d+)?(e[-+]\d+)?")


@dataclass(frozen=True, slots=True)
class Span:
    """MACs of the whole model and of the least possible, as Recoup counts them."""

    most: int
    least: int

    @property
    def has_half(self) -> bool:
        """Whether half of all MACs is within reach."""
        return 2 * self.least <= self.most

    @property
    def goal(self) -> float:
        """Half of all, or where that is out of reach half way to the least."""
        return self.most / 2 if self.has_half else (self.most + self.least) / 2

    @property
    def named(self) -> str:
        """The goal in words."""
        return "half" if self.has_half else "half way"


def span_of(traced: Traced) -> Span:
    """How far the MACs can go down."""
    structure = traced.structure
    as_they_are = {group.name: Ranking(_locked_first(group)) for group in structure.prunable}
    narrowest = Widths(structure, as_they_are).keep(structure.prunable, 0.0, structure.keep_all())
    model = traced.standalone.model  # a standalone form takes long to make, and its MACs are the same
    return Span(*(cost(structure, model, keep).macs for keep in (None, narrowest)))


def locks_of(structure: Structure) -> Locks:
    """The share of MACs that is locked, and what locks most of it."""
    macs = macs_by_product(structure, structure.keep_all())
    fixed = [other for other in structure.others if not other.sides]
    total = max(1, sum(other.macs for other in structure.others) + sum(macs.values()))
    groups = _group_of_channel(structure)
    by_reason: dict[str, float] = {}
    for other in fixed:
        text = f"{_general(other.site)} is no layer, and nothing that it reads is cut"
        by_reason[text] = by_reason.get(text, 0) + other.macs / total
    locked = sum(other.macs for other in fixed)
    for product in structure.products:
        touched = _touched(structure, product.weight, groups)
        if any(group.free and group.width > 1 for group in touched):
            continue
        locked += macs[product]
        for text in {_general(group.reasons[0]) for group in touched if group.reasons}:
            by_reason[text] = by_reason.get(text, 0) + macs[product] / total
    worst = sorted(by_reason.items(), key=lambda item: -item[1])[:REASONS_SHOWN]
    return Locks(locked / total, tuple(Reason(share, text) for text, share in worst))


def _locked_first(group: Group) -> Tensor:
    return group.locked.to(torch.uint8).argsort(descending=True, stable=True)


def _group_of_channel(structure: Structure) -> Tensor:
    widths = torch.tensor([group.width for group in structure.groups], dtype=torch.long)
    return torch.arange(len(widths)).repeat_interleave(widths)


def _touched(structure: Structure, weight: str, groups: Tensor) -> list[Group]:
    """The groups that a layer reads or makes."""
    sides = [site.channel_of for site in structure.sites if site.tensor == weight]
    numbers = {int(number) for side in sides for number in groups[side[side >= 0]].unique()}
    return [structure.groups[number] for number in sorted(numbers)]


def _general(reason: str) -> str:
    """The reason without numbers, those in the names of modules too: one for all blocks of a kind."""
    return NUMBER.sub("*", reason)
