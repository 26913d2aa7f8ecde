"""What pruning has to know of a network's wiring: its groups of channels, where they are and who reads them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from recoup.channels.numbers import Number, settings_after
from recoup.channels.parts import evened, gathered, in_turn, spread
from recoup.labels.constraints import Elementwise, Norm, OtherProduct, Product
from recoup.plan import Slice

# Reasons listed per group: enough to act on, short enough to read.
REASONS_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Channels start..start+width-1: made by `producers`, read by `consumers` (layer names).

    `locked` (width,) marks channels that have to stay; `reasons` says why, by operation and module. `returned` is true
    when the model returns some of them. Where a grouped convolution reads or makes them, `parts` (width,) says in which
    part each lies, -1 for those that stay: every part keeps as many.
    """

    name: str
    start: int
    width: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    locked: Tensor
    reasons: tuple[str, ...]
    returned: bool
    parts: Tensor | None = None

    @property
    def channels(self) -> slice:
        """Where the group's channels lie in a mask over all channels."""
        return slice(self.start, self.start + self.width)

    @property
    def free(self) -> int:
        """How many of its channels may go."""
        return self.width - int(self.locked.sum())

    @property
    def step(self) -> int:
        """How many channels go together, one of each part."""
        return 1 if self.parts is None else max(1, int(self.parts.max()) + 1)

    def rounded(self, count: int) -> int:
        """So many channels, or the next larger number that it can keep."""
        staying = self.width - self.free
        return min(self.width, staying + -(-max(0, count - staying) // self.step) * self.step)

    def kept_by_part(self, keep: Tensor) -> list[int]:
        """How many channels a mask (width,) keeps of each part; empty where there are none."""
        if self.parts is None:
            return []
        return torch.bincount(self.parts[keep & (self.parts >= 0)], minlength=self.step).tolist()

    def free_in_turn(self, order: Tensor | None = None) -> Tensor:
        """Its free channels from 0, in order or in an `order` of them: one of every part before the second of any."""
        free = (~self.locked).nonzero().squeeze(1)
        return self.in_turn(free if order is None else free[order])

    def in_turn(self, order: Tensor) -> Tensor:
        """Its channels from 0 in that order, but one of every part before the second of any."""
        return order if self.parts is None else in_turn(order, self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Index i along `dim` of a parameter or buffer belongs to channel `channel_of[i]`; -1 stays in any case.

    Where the equal runs of dim 0 differ, as in a grouped convolution's weight, it is `channel_of[run, i]`.
    """

    tensor: str
    dim: int
    channel_of: Tensor

    @property
    def runs(self) -> int:
        """Into how many runs dim 0 falls."""
        return len(self.channel_of) if self.channel_of.dim() == 2 else 1

    def slice_of(self, mask: Tensor) -> Slice:
        """What a mask of the shape of `channel_of` leaves."""
        kept = mask.nonzero()[:, -1]
        return Slice(self.tensor, self.dim, kept if self.channel_of.dim() == 1 else kept.view(self.runs, -1))


@dataclass(frozen=True, slots=True, eq=False)
class Consumer:
    """A layer that reads channels and can be refitted. `inputs` and `outputs` say which channel each index is.

    Layers that share a weight are one consumer with several `biases`; a layer without a place for one has none.
    `input_dim` is the dim of the weight that `inputs` lie along, 0 or 1; `outputs` lie along the other. A grouped
    convolution counts as a dense layer whose weight is zero between different `parts`.
    """

    name: str
    weight: str
    biases: tuple[str, ...]
    kernel: int
    input_dim: int
    inputs: Tensor
    outputs: Tensor
    node: str
    parts: int = 1

    def spread(self, weight: Tensor) -> Tensor:
        """A weight of the layer as that of a dense one."""
        return spread(weight, self.parts)

    def gathered(self, dense: Tensor) -> Tensor:
        """The inverse of `spread`."""
        return gathered(dense, self.parts)


@dataclass(frozen=True, eq=False)
class Structure:
    """All that pruning has to know of a network's wiring.

    `values` are the channels of every value in the graph that consists of channels alone; `elementwise` are its batch
    norms and activations, `others` what it multiplies outside of layers, `norms` its normalisations over channels that
    may go. `shared` names weights and biases of layers that somebody else reads too. `numbers` follow the widths of
    groups; the groups of a series keep equally many.
    """

    groups: tuple[Group, ...]
    sites: tuple[Site, ...]
    values: tuple[Tensor, ...]
    consumers: tuple[Consumer, ...]
    products: tuple[Product, ...]
    shapes: Mapping[str, tuple[int, ...]]
    elementwise: tuple[Elementwise, ...] = ()
    shared: frozenset[str] = frozenset()
    others: tuple[OtherProduct, ...] = ()
    norms: tuple[Norm, ...] = ()
    numbers: tuple[Number, ...] = ()
    series: tuple[tuple[str, ...], ...] = ()

    @property
    def width(self) -> int:
        """Number of channels in all groups together."""
        return sum(group.width for group in self.groups)

    @property
    def prunable(self) -> tuple[Group, ...]:
        """Groups that can lose a channel: at least one is free and one remains."""
        return tuple(group for group in self.groups if group.free and group.width > 1)

    @property
    def locked(self) -> Tensor:
        """Mask over all channels of those that have to stay."""
        masks = [g.locked if g.width > 1 else torch.ones_like(g.locked) for g in self.groups]
        return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)

    @property
    def units(self) -> tuple[tuple[Group, ...], ...]:
        """The prunable groups, those of a series together."""
        first = {name: names[0] for names in self.series for name in names}
        found: dict[str, list[Group]] = {}
        for group in self.prunable:
            found.setdefault(first.get(group.name, group.name), []).append(group)
        return tuple(map(tuple, found.values()))

    def group(self, name: str) -> Group:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def consumers_of(self, group: Group) -> tuple[Consumer, ...]:
        """Layers that read at least one of the group's channels."""
        return tuple(consumer for consumer in self.consumers if consumer.name in group.consumers)

    def keep_all(self) -> Tensor:
        """The mask that keeps every channel."""
        return torch.ones(self.width, dtype=torch.bool)

    def keep_indices(self, channel_of: Tensor, keep: Tensor) -> Tensor:
        """Bool mask over the indices of a site, given the mask over all channels."""
        return (channel_of < 0) | keep[channel_of.clamp(min=0)]

    def slices(self, keep: Tensor) -> tuple[Slice, ...]:
        """What `keep` leaves of every parameter and buffer it touches."""
        cut = ((site, self.keep_indices(site.channel_of, keep)) for site in self.sites)
        found = (site.slice_of(mask) for site, mask in cut if not bool(mask.all()))
        return tuple(replace(piece, factor=self._factor(piece)) for piece in found)

    def _factor(self, piece: Slice) -> float:
        """What makes up for a normalisation over fewer channels, where a tensor is the gain of one."""
        is_gain = any(norm.gain == piece.tensor for norm in self.norms)
        return math.sqrt(self.shapes[piece.tensor][piece.dim] / piece.count) if is_gain else 1.0

    @cached_property
    def _never_empty(self) -> list[tuple[int, int, Tensor]]:
        """Every distinct set of channels of which one has to remain, with its first and last: sites, then values."""
        found = (channels.unique() for channels in (*(site.channel_of for site in self.sites), *self.values))
        distinct = {channels.numpy().tobytes(): channels for channels in found if len(channels)}
        ends = ((int(channels[0]), int(channels[-1]), channels) for channels in distinct.values())
        return [(first, last, channels) for first, last, channels in ends if first >= 0]

    def refill(self, keep: Tensor, order: Tensor) -> Tensor:
        """`keep` with the first channel in `order` put back wherever a layer or a value would be left without any.

        Where every part of a group has to keep as many, so are the first of the parts that keep fewer. A piece of what
        a layer makes, as a split gives it, may be a value that no parameter belongs to.
        """
        filled = keep.clone()
        low, high = (int(order.min()), int(order.max())) if len(order) else (0, -1)
        for first, last, channels in self._never_empty:
            if last < low or first > high:
                continue
            if not bool(filled[channels].any()):
                filled[order[torch.isin(order, channels)][:1]] = True
        for group in self.groups:
            if group.parts is not None and low < group.start + group.width and high >= group.start:
                local = order[(order >= group.start) & (order < group.start + group.width)] - group.start
                filled[group.channels] = evened(filled[group.channels], local, group.parts)
        return filled

    def settings(self, keep: Tensor) -> dict[str, int]:
        """What modules and configs remember of sizes once only `keep` is left."""
        return settings_after(self.numbers, self.masks(keep))

    def masks(self, keep: Tensor) -> dict[str, Tensor]:
        """`keep` split by group."""
        return {group.name: keep[group.channels] for group in self.groups}

    def lock(self, names: Mapping[str, str]) -> Structure:
        """The same structure with whole groups locked, {name: reason}."""
        return replace(
            self,
            groups=tuple(
                replace(g, locked=torch.ones_like(g.locked), reasons=(names[g.name], *g.reasons)[:REASONS_SHOWN])
                if g.name in names
                else g
                for g in self.groups
            ),
        )


def without(structure: Structure, tensors: frozenset[str]) -> Structure:
    """The structure of a model that does not have these tensors."""
    sites = tuple(site for site in structure.sites if site.tensor not in tensors)
    shapes = {name: shape for name, shape in structure.shapes.items() if name not in tensors}
    return replace(structure, sites=sites, shapes=shapes)


def with_free_sums(structure: Structure, weights: Collection[str]) -> Structure:
    """The structure in which layers of these weights cost nothing: they stand for sums, and multiply no matrices."""
    products = tuple(replace(p, positions=0) if p.weight in weights else p for p in structure.products)
    return replace(structure, products=products)


def with_every_bias(structure: Structure) -> Structure:
    """The structure of a standalone form, in which every layer that could have a bias has one."""
    names: dict[str, list[str | None]] = {}
    for product in structure.products:
        names.setdefault(product.weight, []).append(None if product.bias in structure.shared else product.bias)
    biases = {
        weight: tuple(dict.fromkeys(n for n in given if n)) for weight, given in names.items() if None not in given
    }
    return replace(structure, consumers=tuple(replace(c, biases=biases.get(c.weight, ())) for c in structure.consumers))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it goes by."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def numbers(labels: Tensor, numbering: Tensor) -> Tensor:
    """Channel numbers in the place of labels, -1 for what is no channel."""
    if not len(numbering):
        return torch.full_like(labels, -1)
    return torch.where(labels >= 0, numbering[labels.clamp(min=0)], -1)
