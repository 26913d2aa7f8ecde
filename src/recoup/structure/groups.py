"""Groups of channels that can only go together, resolved from the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from recoup.plan import Slice
from recoup.structure.labels import components
from recoup.structure.ledger import Ledger, Product

# Reasons listed per group: enough to act on, short enough to read.
REASONS_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Channels start..start+width-1: made by `producers`, read by `consumers` (layer names).

    `locked` (width,) marks channels that have to stay; `reasons` says why, by operation and module.
    """

    name: str
    start: int
    width: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    locked: Tensor
    reasons: tuple[str, ...]

    @property
    def channels(self) -> slice:
        """Where the group's channels lie in a mask over all channels."""
        return slice(self.start, self.start + self.width)

    @property
    def free(self) -> int:
        """How many of its channels may go."""
        return self.width - int(self.locked.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Index i along `dim` of a parameter or buffer belongs to channel `channel_of[i]`; -1 stays in any case."""

    tensor: str
    dim: int
    channel_of: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Consumer:
    """A layer that reads channels and can be refitted. `inputs` and `outputs` say which channel each index is."""

    name: str
    weight: str
    bias: str
    kernel: int
    inputs: Tensor
    outputs: Tensor
    node: str


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """All that pruning has to know of a network's wiring."""

    groups: tuple[Group, ...]
    sites: tuple[Site, ...]
    consumers: tuple[Consumer, ...]
    products: tuple[Product, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def width(self) -> int:
        """Number of channels in all groups together."""
        return sum(group.width for group in self.groups)

    @property
    def prunable(self) -> tuple[Group, ...]:
        """Groups that can lose a channel: at least one is free and one remains."""
        return tuple(group for group in self.groups if group.free and group.width > 1)

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
        return tuple(Slice(s.tensor, s.dim, mask.nonzero().squeeze(1)) for s, mask in cut if not bool(mask.all()))

    def refill(self, keep: Tensor, order: Tensor) -> Tensor:
        """`keep` with the first channel in `order` put back wherever a layer would be left without any."""
        filled = keep.clone()
        for site in self.sites:
            candidates = order[torch.isin(order, site.channel_of)]
            if len(candidates) and not bool(self.keep_indices(site.channel_of, filled).any()):
                filled[candidates[0]] = True
        return filled

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


def resolve(ledger: Ledger, model: nn.Module) -> Structure:
    """Groups, sites and consumers from what the walk wrote down."""
    _lock_unfit_layers(ledger, model)
    channel_of_label, group_of_label = _components(ledger)
    numbering, groups = _number_channels(ledger, channel_of_label, group_of_label)
    sites = tuple(Site(name, dim, _numbers(labels, numbering)) for (name, dim), labels in ledger.sites.items())
    consumers = _consumers(ledger, numbering)
    shapes = {name: tuple(tensor.shape) for name, tensor in _named_tensors(model).items()}
    groups = tuple(_with_consumers(group, consumers) for group in groups)
    return Structure(groups, sites, consumers, tuple(ledger.products), shapes)


def has_place_for_bias(model: nn.Module, weight: str) -> bool:
    """Whether the layer that owns `weight` takes a bias, now or later."""
    owner, _, attribute = weight.rpartition(".")
    module = model.get_submodule(owner)
    return attribute == "weight" and "bias" in module._parameters


def _lock_unfit_layers(ledger: Ledger, model: nn.Module) -> None:
    for product in ledger.products:
        if not product.depthwise and not has_place_for_bias(model, product.weight):
            reason = f"{product.weight} in {product.where or 'forward'} has no place for a bias"
            ledger.lock(ledger.sites[product.weight, 1], reason)


def _components(ledger: Ledger) -> tuple[Tensor, Tensor]:
    """For every label, the first label of its channel and the first label of its group."""
    edges = torch.cat(ledger.edges, dim=1) if ledger.edges else torch.zeros(2, 0, dtype=torch.long)
    channel_of = components(ledger.count, edges)
    stars = [torch.arange(block.start, block.start + block.count) for block in ledger.blocks]
    within = [torch.stack([torch.full_like(star, int(star[0])), star]) for star in stars if len(star)]
    return channel_of, components(ledger.count, torch.cat([edges, *within], dim=1))


def _number_channels(ledger: Ledger, channel_of: Tensor, group_of: Tensor) -> tuple[Tensor, tuple[Group, ...]]:
    """Channel numbers, consecutive within each group, for every label (-1: no group), and the groups themselves."""
    numbering = torch.full((ledger.count,), -1)
    groups: list[Group] = []
    start = 0
    makers = {int(group_of[block.start]) for block in ledger.blocks if block.by_layer and block.count}
    for root in sorted(makers):
        members = (group_of == root).nonzero().squeeze(1)
        channels, position = channel_of[members].unique(return_inverse=True)
        numbering[members] = start + position
        locked, reasons = _locks(ledger, channel_of, channels)
        producers = tuple(_layer(block.source) for block in ledger.blocks if int(group_of[block.start]) == root)
        groups.append(Group(producers[0], start, len(channels), producers, (), locked, reasons))
        start += len(channels)
    return numbering, tuple(groups)


def _locks(ledger: Ledger, channel_of: Tensor, channels: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    locked = torch.zeros(len(channels), dtype=torch.bool)
    reasons: dict[str, None] = {}
    for lock in ledger.locks:
        hit = torch.isin(channels, channel_of[lock.labels])
        if bool(hit.any()):
            locked |= hit
            reasons[lock.reason] = None
    return locked, tuple(reasons)[:REASONS_SHOWN]


def _consumers(ledger: Ledger, numbering: Tensor) -> tuple[Consumer, ...]:
    """One consumer per weight: a layer that is called twice is refitted once."""
    found: dict[str, Consumer] = {}
    for product in ledger.products:
        inputs = _numbers(ledger.sites[product.weight, 1], numbering) if not product.depthwise else None
        if inputs is None or product.weight in found or not bool((inputs >= 0).any()):
            continue
        outputs = _numbers(ledger.sites[product.weight, 0], numbering)
        name = _layer(product.weight)
        bias = product.bias or f"{name}.bias"
        found[product.weight] = Consumer(name, product.weight, bias, product.kernel, inputs, outputs, product.node)
    return tuple(found.values())


def _with_consumers(group: Group, consumers: tuple[Consumer, ...]) -> Group:
    low, high = group.start, group.start + group.width
    readers = tuple(c.name for c in consumers if bool(((c.inputs >= low) & (c.inputs < high)).any()))
    if readers:
        return replace(group, consumers=readers)
    reasons = (*group.reasons, "no layer reads it")[:REASONS_SHOWN]
    return replace(group, locked=torch.ones_like(group.locked), reasons=reasons)


def _numbers(labels: Tensor, numbering: Tensor) -> Tensor:
    if not len(numbering):
        return torch.full_like(labels, -1)
    return torch.where(labels >= 0, numbering[labels.clamp(min=0)], -1)


def _layer(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
