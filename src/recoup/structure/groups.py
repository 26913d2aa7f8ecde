"""Groups of channels that can only go together, resolved from the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from recoup.plan import Slice
from recoup.structure.capture import Captured
from recoup.structure.labels import components, compress, core, varying_dims
from recoup.structure.ledger import RETURNED, Ledger, Product
from recoup.structure.settle import Settled, settle, settled
from recoup.structure.walk import Walked

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

    Layers that share a weight are one consumer with several `biases`; a layer without a place for one has none.
    `input_dim` is the dim of the weight that `inputs` lie along, 0 or 1; `outputs` lie along the other.
    """

    name: str
    weight: str
    biases: tuple[str, ...]
    kernel: int
    input_dim: int
    inputs: Tensor
    outputs: Tensor
    node: str


@dataclass(frozen=True, eq=False)
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

    @property
    def locked(self) -> Tensor:
        """Mask over all channels of those that have to stay."""
        masks = [g.locked if g.width > 1 else torch.ones_like(g.locked) for g in self.groups]
        return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)

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

    @cached_property
    def _sites_by_channel(self) -> list[tuple[int, int, Site]]:
        """Every distinct site with the first and the last channel it has."""
        distinct = {
            site.channel_of.numpy().tobytes(): site for site in self.sites if bool((site.channel_of >= 0).any())
        }
        found = [(site.channel_of[site.channel_of >= 0], site) for site in distinct.values()]
        return [(int(channels.min()), int(channels.max()), site) for channels, site in found]

    def refill(self, keep: Tensor, order: Tensor) -> Tensor:
        """`keep` with the first channel in `order` put back wherever a layer would be left without any."""
        filled = keep.clone()
        low, high = (int(order.min()), int(order.max())) if len(order) else (0, -1)
        for first, last, site in self._sites_by_channel:
            if last < low or first > high:
                continue
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


def resolve(walked: Walked, model: nn.Module, captured: Captured) -> tuple[Structure, Tensor]:
    """Groups, sites and consumers from what the walk wrote down, and the channel number of every label (-1: none)."""
    ledger = walked.ledger
    _lock_double_uses(ledger)
    _lock_lone_channels(walked, settle(ledger))
    state = settled(ledger)
    numbering, groups = _number_channels(ledger, state)
    sites = (*_sites(ledger, numbering), *_sites_of_elements(ledger, numbering))
    consumers = _consumers(ledger, numbering, model)
    groups = tuple(_with_consumers(group, consumers) for group in groups)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    shapes |= {captured.tensors[name]: tuple(value.shape) for name, value in captured.values.items()}
    return Structure(groups, sites, consumers, tuple(ledger.products), shapes), numbering


def without(structure: Structure, tensors: frozenset[str]) -> Structure:
    """The structure of a model that does not have these tensors."""
    sites = tuple(site for site in structure.sites if site.tensor not in tensors)
    shapes = {name: shape for name, shape in structure.shapes.items() if name not in tensors}
    return replace(structure, sites=sites, shapes=shapes)


def with_every_bias(structure: Structure) -> Structure:
    """The structure of a standalone form, in which every layer that could have a bias has one."""
    names: dict[str, list[str | None]] = {}
    for product in structure.products:
        names.setdefault(product.weight, []).append(product.bias)
    biases = {
        weight: tuple(dict.fromkeys(n for n in given if n)) for weight, given in names.items() if None not in given
    }
    return replace(structure, consumers=tuple(replace(c, biases=biases.get(c.weight, ())) for c in structure.consumers))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by every name it goes by."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def place_of_bias(model: nn.Module, tensors: Mapping[str, Tensor], product: Product) -> str | None:
    """Name of the bias that the call adds, now or once its layer has one; None where there is no place for it."""
    module = model.get_submodule(product.where)
    if product.weight not in tensors or module._parameters.get("weight") is not tensors[product.weight]:
        return None
    if product.bias is not None and product.bias in tensors:
        return product.bias if module._parameters.get("bias") is tensors[product.bias] else None
    return f"{product.where}.bias" if isinstance(module, (_ConvNd, nn.Linear)) and module.bias is None else None


def numbers(labels: Tensor, numbering: Tensor) -> Tensor:
    """Channel numbers in the place of labels, -1 for what is no channel."""
    if not len(numbering):
        return torch.full_like(labels, -1)
    return torch.where(labels >= 0, numbering[labels.clamp(min=0)], -1)


def _lock_double_uses(ledger: Ledger) -> None:
    """A weight that one layer sums over its rows and another over its columns cannot be refitted for both."""
    dims: dict[str, set[int | None]] = {}
    for product in ledger.products:
        dims.setdefault(product.weight, set()).add(product.input_dim)
    for weight in (name for name, used in dims.items() if len(used) > 1):
        for dim in (0, 1):
            if (weight, dim) in ledger.sites:
                ledger.lock(ledger.sites[weight, dim], f"{weight} is used in two ways")


def _lock_lone_channels(walked: Walked, state: Settled) -> None:
    """A value that consists of a single channel would be empty without it."""
    for value in walked.labels.values():
        for labels in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(labels, Tensor):
                continue
            lone = _lone_channel(labels, state)
            if lone >= 0:
                walked.ledger.lock(torch.tensor([lone]), SINGLE)


def _lone_channel(labels: Tensor, state: Settled) -> int:
    """The channel that a value consists of, or -1."""
    (small,) = core(labels)
    ends = state.open(small.flatten()[[0, -1]] if small.numel() else small.flatten())
    if not len(ends) or int(ends[0]) < 0 or int(ends[0]) != int(ends[-1]):
        return -1
    return int(ends[0]) if bool((state.open(small) == ends[0]).all()) else -1


def _number_channels(ledger: Ledger, state: Settled) -> tuple[Tensor, tuple[Group, ...]]:
    """Channel numbers, consecutive within each group, for every label (-1: no group), and the groups themselves."""
    numbering = torch.full((ledger.count,), -1)
    groups: list[Group] = []
    start = 0
    group_of = _groups_of(ledger, state)
    makers: dict[int, list[str]] = {}
    for block in ledger.blocks:
        if block.count:
            makers.setdefault(int(group_of[block.start]), []).append(_layer(block.source))
    order = group_of.argsort(stable=True)
    bounds = torch.searchsorted(group_of[order], torch.tensor([[root, root + 1] for root in sorted(makers)]))
    for root, (low, high) in zip(sorted(makers), bounds.tolist(), strict=True):
        members = order[low:high]
        channels, position = state.root[members].unique(return_inverse=True)
        numbering[members] = start + position
        groups.append(_group(ledger, state, tuple(makers[root]), start, channels))
        start += len(channels)
    return numbering, tuple(groups)


def _groups_of(ledger: Ledger, state: Settled) -> Tensor:
    """For every label the first label of its group: all that one layer makes is in one group."""
    stars = [torch.arange(block.start, block.start + block.count) for block in ledger.blocks if block.count]
    within = [torch.stack([torch.full_like(star, int(star[0])), star]) for star in stars]
    every = torch.stack([torch.arange(ledger.count), state.root])
    return components(ledger.count, torch.cat([every, *within], dim=1))


def _group(ledger: Ledger, state: Settled, producers: tuple[str, ...], start: int, channels: Tensor) -> Group:
    locked, reasons = _locks(ledger, state.root, channels)
    if len(channels) == 1 and not reasons:
        locked, reasons = torch.ones_like(locked), (SINGLE,)
    shown, returned = reasons[:REASONS_SHOWN], RETURNED in reasons
    return Group(producers[0], start, len(channels), producers, (), locked, shown, returned)


def _sites(ledger: Ledger, numbering: Tensor) -> list[Site]:
    return [Site(name, dim, numbers(labels, numbering)) for (name, dim), labels in ledger.sites.items()]


def _sites_of_elements(ledger: Ledger, numbering: Tensor) -> list[Site]:
    """Free parameters of several dims, now that it is known along which of them their channels lie."""
    found = []
    for name, labels in ledger.elements.items():
        channels = compress(numbers(labels, numbering))
        for dim in varying_dims(channels)[:1]:
            along = channels.movedim(dim, 0).flatten(1).amax(dim=1)
            if not any(key == (name, dim) for key in ledger.sites):
                found.append(Site(name, dim, along))
    return found


def _locks(ledger: Ledger, channel_of: Tensor, channels: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    locked = torch.zeros(len(channels), dtype=torch.bool)
    reasons: dict[str, None] = {}
    for lock in ledger.locks:
        hit = torch.isin(channels, channel_of[lock.labels])
        if bool(hit.any()):
            locked |= hit
            reasons[lock.reason] = None
    return locked, tuple(reasons)


def _consumers(ledger: Ledger, numbering: Tensor, model: nn.Module) -> tuple[Consumer, ...]:
    """One consumer per weight: a layer that is called twice, or shares its weight, is refitted once."""
    calls: dict[str, list[Product]] = {}
    for product in ledger.products:
        if product.input_dim is not None:
            calls.setdefault(product.weight, []).append(product)
    places = _places_of_biases(ledger, model)
    found = (_consumer(weight, products, ledger, numbering, places) for weight, products in calls.items())
    return tuple(consumer for consumer in found if bool((consumer.inputs >= 0).any()))


def _places_of_biases(ledger: Ledger, model: nn.Module) -> dict[str, str | None]:
    """For every call of a layer, by node, the name of the bias it has a place for."""
    tensors = named_tensors(model)
    return {product.node: place_of_bias(model, tensors, product) for product in ledger.products}


def _consumer(
    weight: str, products: list[Product], ledger: Ledger, numbering: Tensor, places: Mapping[str, str | None]
) -> Consumer:
    first = products[0]
    assert first.input_dim is not None
    inputs = numbers(ledger.sites[weight, first.input_dim], numbering)
    outputs = numbers(ledger.sites[weight, first.output_dim], numbering)
    found = dict.fromkeys(places[product.node] for product in products)
    biases = () if None in found else tuple(place for place in found if place is not None)
    return Consumer(_layer(weight), weight, biases, first.kernel, first.input_dim, inputs, outputs, first.node)


def _with_consumers(group: Group, consumers: tuple[Consumer, ...]) -> Group:
    low, high = group.start, group.start + group.width
    readers = tuple(c.name for c in consumers if bool(((c.inputs >= low) & (c.inputs < high)).any()))
    if readers:
        return replace(group, consumers=readers)
    reasons = (*group.reasons, "no layer reads it")[:REASONS_SHOWN]
    return replace(group, locked=torch.ones_like(group.locked), reasons=reasons)


def _layer(parameter: str) -> str:
    return parameter.removesuffix(".weight")
