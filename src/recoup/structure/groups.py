"""Groups of channels that can only go together, resolved from the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from recoup.plan import Slice
from recoup.structure.labels import components
from recoup.structure.ledger import RETURNED, Ledger, Product

# Reasons listed per group: enough to act on, short enough to read.
REASONS_SHOWN = 3
SINGLE = "all of it is one channel: its layers make a single one, or an operation ties them together"


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Channels start..start+width-1: made by `producers`, read by `consumers` (layer names).

    `locked` (width,) marks channels that have to stay; `reasons` says why, by operation and module. `returned` is true
    when the model returns some of them.
    """

    name: str
    start: int
    width: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    locked: Tensor
    reasons: tuple[str, ...]
    returned: bool

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
    """A layer that reads channels and can be refitted. `inputs` and `outputs` say which channel each index is.

    Layers that share a weight are one consumer with several `biases`.
    """

    name: str
    weight: str
    biases: tuple[str, ...]
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
            if not bool(self.keep_indices(site.channel_of, filled).any()):
                filled[order[torch.isin(order, site.channel_of)][:1]] = True
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
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    groups = tuple(_with_consumers(group, consumers) for group in groups)
    return Structure(groups, sites, consumers, tuple(ledger.products), shapes)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it goes by."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def reads_its_bias(model: nn.Module, product: Product) -> bool:
    """Whether the call happens in a layer that owns the weight and adds its own bias, now or once it has one."""
    module, tensors = model.get_submodule(product.where), named_tensors(model)
    if module._parameters.get("weight") is not tensors[product.weight]:
        return False
    if product.bias is not None:
        return module._parameters.get("bias") is tensors[product.bias]
    return isinstance(module, (_ConvNd, nn.Linear)) and module.bias is None


def _lock_unfit_layers(ledger: Ledger, model: nn.Module) -> None:
    for product in ledger.products:
        if not product.depthwise and not reads_its_bias(model, product):
            reason = f"{product.weight} is used in {product.where or 'forward'}, which has no place for a bias"
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
        if len(channels) == 1 and not reasons:
            locked, reasons = torch.ones_like(locked), (SINGLE,)
        producers = tuple(_layer(block.source) for block in ledger.blocks if int(group_of[block.start]) == root)
        shown, returned = reasons[:REASONS_SHOWN], RETURNED in reasons
        groups.append(Group(producers[0], start, len(channels), producers, (), locked, shown, returned))
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
    return locked, tuple(reasons)


def _consumers(ledger: Ledger, numbering: Tensor) -> tuple[Consumer, ...]:
    """One consumer per weight: a layer that is called twice, or shares its weight, is refitted once."""
    calls: dict[str, list[Product]] = {}
    for product in ledger.products:
        if not product.depthwise:
            calls.setdefault(product.weight, []).append(product)
    found = (_consumer(weight, products, ledger, numbering) for weight, products in calls.items())
    return tuple(consumer for consumer in found if bool((consumer.inputs >= 0).any()))


def _consumer(weight: str, products: list[Product], ledger: Ledger, numbering: Tensor) -> Consumer:
    inputs, outputs = (_numbers(ledger.sites[weight, dim], numbering) for dim in (1, 0))
    biases = dict.fromkeys(product.bias or f"{product.where}.bias" for product in products)
    first = products[0]
    return Consumer(_layer(weight), weight, tuple(biases), first.kernel, inputs, outputs, first.node)


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
