"""The ledger: what the walk over the graph finds out about labels, written down now and resolved once at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recoup.structure.labels import FIXED, NONE, along, constant, core

RETURNED = "the model returns it"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A parameter, buffer or constant of the model, by dotted name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Labels start..start+count-1, made together by one parameter."""

    start: int
    count: int
    source: str
    by_layer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Lock:
    """Labels that must stay, and why."""

    labels: Tensor
    reason: str


@dataclass(frozen=True, slots=True)
class Product:
    """One call of a layer that multiplies by a weight: its cost is positions · kernel · inputs · outputs.

    A depthwise call (`depthwise`) has no sum over inputs. `node` is the call's name in the graph.
    """

    weight: str
    bias: str | None
    positions: int
    kernel: int
    depthwise: bool
    where: str
    node: str


@dataclass(slots=True)
class Ledger:
    """Blocks, couplings, locks, sites and products, in the order they were met."""

    blocks: list[Block] = field(default_factory=list)
    edges: list[Tensor] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    sites: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    count: int = 0

    def fresh(self, count: int, source: str, *, by_layer: bool) -> Tensor:
        """New labels (count,) for the channels that `source` makes."""
        self.blocks.append(Block(self.count, count, source, by_layer))
        self.count += count
        return torch.arange(self.count - count, self.count)

    def lock(self, labels: Tensor, reason: str) -> None:
        """Whatever `labels` name has to stay."""
        (small,) = core(labels)
        named = small[small >= 0].unique()
        if named.numel():
            self.locks.append(Lock(named, reason))

    def couple(self, left: Tensor, right: Tensor, reason: str) -> Tensor:
        """Labels that meet element by element are one channel from now on; what meets FIXED is locked."""
        a, b = (t.flatten() for t in core(*torch.broadcast_tensors(left, right)))
        both = (a >= 0) & (b >= 0) & (a != b)
        if bool(both.any()):
            self.edges.append(torch.stack([a[both], b[both]]).unique(dim=1))
        self.lock(a[(b == FIXED)], reason)
        self.lock(b[(a == FIXED)], reason)
        return torch.where(left >= 0, left, torch.where(right >= 0, right, torch.minimum(left, right)))

    def channels_along(self, labels: Tensor, dim: int, reason: str) -> Tensor:
        """One label for each index of `dim` (n,); several that share an index are tied together."""
        (small,) = core(labels)
        if small.shape[dim] == 1:
            small = small.expand([*small.shape[:dim], labels.shape[dim], *small.shape[dim + 1 :]])
        table = small.movedim(dim, 0).flatten(1)
        merged = table[:, 0]
        for column in table[:, 1:].unique(dim=1).T:
            merged = self.couple(merged, column, reason)
        return merged

    def site(self, tensor: TensorRef, dim: int, labels: Tensor) -> None:
        """Index i along `dim` of a parameter or buffer goes with labels[i]."""
        known = self.sites.get((tensor.name, dim))
        self.sites[tensor.name, dim] = (
            labels if known is None else self.couple(known, labels, f"{tensor.name} is used in several places")
        )

    def outputs(self, weight: TensorRef, count: int) -> Tensor:
        """Labels of what a weight's rows make: the same at every call."""
        known = self.sites.get((weight.name, 0))
        if known is None:
            known = self.fresh(count, weight.name, by_layer=True)
            self.site(weight, 0, known)
        return known

    def labels_of(self, value: Tensor | TensorRef) -> Tensor:
        """Labels of an operand; a vector of free parameters brings channels of its own."""
        if not isinstance(value, TensorRef):
            return value
        wide = [dim for dim, size in enumerate(value.shape) if size > 1]
        if not wide:
            return constant(value.shape, NONE)
        if len(wide) > 1:
            return constant(value.shape, FIXED)
        known = self.sites.get((value.name, wide[0]))
        if known is None:
            known = self.fresh(value.shape[wide[0]], value.name, by_layer=False)
            self.site(value, wide[0], known)
        return along(known, wide[0], value.shape)
