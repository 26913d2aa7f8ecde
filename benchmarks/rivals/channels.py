"""What all recipes share: a copy of the model, its groups of channels, gates on them, and widths within a budget.

A gate is a factor on a channel. It is applied where the channel is read: to the inputs of every layer that reads it. So
coupled channels, those of a residual stream for instance, have one gate, and a gate of zero is a channel removed, up
to what a batch norm has to estimate again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

import recoup
from benchmarks.baselines import ROUNDING, largest_share, plan_without_refit
from recoup.channels.cost_model import CostModel, macs_model
from recoup.channels.structure import Group, Structure
from recoup.errors import BudgetError

Counts: TypeAlias = Mapping[str, int]
"""Channels to keep, by group."""
Orders: TypeAlias = Mapping[str, Tensor]
"""Channel numbers by group, best first."""
Pruned: TypeAlias = tuple[nn.Module, dict[str, float]]
"""The smaller network, and the seconds that each stage took."""


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A layer that reads channels: index i along `dim` of its weight belongs to `channel_of[i]`, -1 to none."""

    module: str
    weight: str
    dim: int
    channel_of: Tensor

    def along(self, per_channel: Tensor, weight: Tensor) -> Tensor:
        """A value for every channel as a factor of the weight; 1 where an input is no channel."""
        per_input = torch.cat([per_channel, per_channel.new_ones(1)])[self.channel_of]  # -1 is the one at the end
        return per_input.view([-1 if dim == self.dim else 1 for dim in range(weight.dim())])


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A copy of the model that a recipe may change, its structure, and the MACs that may remain."""

    model: nn.Module
    structure: Structure
    readers: tuple[Reader, ...]
    allowed: float

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that can lose channels, in the order of the network."""
        return self.structure.prunable

    @property
    def free(self) -> Tensor:
        """Mask over all channels of those that may go."""
        free = torch.zeros(self.structure.width, dtype=torch.bool)
        for group in self.groups:
            free[group.channels] = ~group.locked
        return free

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def readers_of(self, group: Group) -> list[Reader]:
        """The layers that read channels of a group."""
        return [reader for reader in self.readers if reader.module in group.consumers]


def subject_of(model: nn.Module, images: Tensor, share: float) -> Subject:
    """A copy to work on; groups are those that the model's own class can hold at other sizes, for it has to train.

    Raises:
        BudgetError: the share is none.
    """
    if not 0 < share <= 1:
        raise BudgetError(f"share={share} of the MACs cannot be kept. Give more than 0 and at most 1.")
    twin = copy.deepcopy(model).eval()
    structure = recoup.trace(twin, images[:1], keep_class=True).structure
    readers = tuple(
        Reader(consumer.name, consumer.weight, consumer.input_dim, consumer.inputs.to(images.device))
        for consumer in structure.consumers
    )
    whole = macs_model(structure, {}).total({})
    return Subject(twin, structure, readers, share * whole * (1 + ROUNDING))


def gated_weights(subject: Subject, gate: Tensor) -> dict[str, Tensor]:
    """The weights of all readers with a gate (channels,) on their inputs; gradients reach both."""
    weights = {reader: subject.model.get_parameter(reader.weight) for reader in subject.readers}
    return {reader.weight: weight * reader.along(gate, weight) for reader, weight in weights.items()}


def gated(subject: Subject, gate: Tensor, images: Tensor) -> Tensor:
    """What the model says of images with a gate (channels,) on its channels."""
    return called(subject.model, gated_weights(subject, gate), images)


def called(model: nn.Module, weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """What the model says of images with other weights, in float32."""
    scores: Any = functional_call(model, weights, (images,))
    assert isinstance(scores, Tensor)
    return scores.float()


def fold(subject: Subject, gate: Tensor) -> None:
    """Write a gate into the weights of the model."""
    with torch.no_grad():
        for name, weight in gated_weights(subject, gate).items():
            subject.model.get_parameter(name).copy_(weight)


def column_sums(subject: Subject, values: Mapping[str, Tensor]) -> Tensor:
    """For every channel the sum of `values`, shaped as the weights they are named after, over all that read it."""
    total = torch.zeros(subject.structure.width + 1, dtype=torch.float64, device=subject.device)
    for reader in (reader for reader in subject.readers if reader.weight in values):
        per_input = values[reader.weight].double().movedim(reader.dim, 0).flatten(1).sum(dim=1)
        total.index_add_(0, reader.channel_of % len(total), per_input)  # -1 goes to the place past the end
    return total[:-1]


def best_first(structure: Structure, score: Tensor) -> dict[str, Tensor]:
    """The channels of every group by falling score (channels,); those that have to stay come first."""
    found = {}
    for group in structure.prunable:
        staying_first = torch.where(group.locked, torch.inf, score.cpu().double()[group.channels])
        found[group.name] = group.start + staying_first.argsort(descending=True, stable=True)
    return found


def least_counts(structure: Structure) -> dict[str, int]:
    """The fewest channels that each group can keep."""
    return {group.name: max(1, group.width - group.free) for group in structure.prunable}


def keep_first(structure: Structure, orders: Orders, counts: Counts) -> Tensor:
    """The mask over all channels that keeps so many of each group, the first in its order."""
    keep = structure.keep_all()
    for group in structure.prunable:
        keep[group.channels] = False
        keep[orders[group.name][: counts[group.name]]] = True
    return keep


def counts_by_share(subject: Subject, score: Tensor) -> dict[str, int]:
    """The same share of every group, the largest within the budget; what that leaves over goes to single channels."""

    def counts(share: float) -> dict[str, int]:
        parts = {g.name: g.width - g.free + math.ceil(share * g.free - ROUNDING) for g in subject.groups}
        return {name: max(1, count) for name, count in parts.items()}

    return _largest(subject, score, counts)


def counts_by_score(subject: Subject, score: Tensor, most: Counts | None = None) -> dict[str, int]:
    """Counts within the budget, and within `most`, that drop the channels of the lowest scores, of whatever group."""
    orders, least = best_first(subject.structure, score), least_counts(subject.structure)
    most = _widths(subject) if most is None else most
    ranks = score.cpu().double().where(subject.free, torch.inf).argsort(stable=True).argsort()
    free = int(subject.free.sum())

    def counts(share: float) -> dict[str, int]:
        kept = ranks >= math.floor((1 - share) * free)
        return {name: min(most[name], max(least[name], int(kept[order].sum()))) for name, order in orders.items()}

    return _largest(subject, score, counts, most)


def counts_by_weight(subject: Subject, weights: Mapping[str, float]) -> dict[str, int]:
    """Widths in proportion to `weights` by group, no group wider than it is, as wide as the budget allows."""
    least = least_counts(subject.structure)
    top = 1 / min(weights.values())

    def counts(share: float) -> dict[str, int]:
        parts = {g.name: math.ceil(min(1.0, weights[g.name] * share * top) * g.width) for g in subject.groups}
        return {name: max(least[name], part) for name, part in parts.items()}

    return _largest(subject, torch.zeros(subject.structure.width), counts)


def _largest(
    subject: Subject, score: Tensor, counts: Callable[[float], dict[str, int]], most: Counts | None = None
) -> dict[str, int]:
    cost = macs_model(subject.structure, best_first(subject.structure, score))
    best = counts(largest_share(lambda share: cost.total(counts(share)) <= subject.allowed))
    by_share = sorted(subject.groups, key=lambda group: best[group.name] / group.width)
    return filled(subject, cost, best, [group.name for group in by_share], most)


def filled(
    subject: Subject, cost: CostModel, counts: Counts, groups: Sequence[str], most: Counts | None = None
) -> dict[str, int]:
    """`counts` with single channels put back, group after group, as long as they fit the budget, and `most` if any."""
    found, most = dict(counts), _widths(subject) if most is None else most
    grew = True
    while grew:
        grew = False
        for name in groups:
            wider = {**found, name: found[name] + 1}
            if wider[name] <= most[name] and cost.total(wider) <= subject.allowed:
                found, grew = wider, True
    return found


def _widths(subject: Subject) -> dict[str, int]:
    return {group.name: group.width for group in subject.groups}


def cut(subject: Subject, keep: Tensor) -> nn.Module:
    """The model without the channels that are not in `keep`."""
    return recoup.apply(subject.model, plan_without_refit(subject.structure, keep)).eval()
