"""Groups of channels that can only go together, resolved from the constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from recoup.channels.bias_places import places_of_biases, shared_biases
from recoup.channels.locks import labels_in, lock_double_uses, lock_lone_channels, lock_shared_weights
from recoup.channels.norm_paths import hold_norms
from recoup.channels.numbers import Number, settings_after
from recoup.channels.parts import cells_of, evened, gathered, groups_of, in_turn, settled, spread
from recoup.channels.propagate import Propagated
from recoup.channels.rectangles import Resolution, resolution
from recoup.channels.ties import why_single
from recoup.graph.capture import Captured
from recoup.graph.usage import read_in_other_roles
from recoup.labels.arrays import compress, core, varying_dims
from recoup.labels.constraints import RETURNED, Constraints, Elementwise, Norm, OtherProduct, Product
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


def resolve(propagated: Propagated, model: nn.Module, captured: Captured) -> tuple[Structure, Tensor]:
    """Groups, sites and consumers from what was propagated, and the channel number of every label (-1: none)."""
    constraints = propagated.constraints
    hold_norms(constraints, captured)
    lock_double_uses(constraints)
    shared = read_in_other_roles(captured) | shared_biases(constraints.products, captured)
    lock_shared_weights(constraints, shared)
    lock_lone_channels(propagated, settled(constraints, shared), captured)
    state = resolution(constraints)
    numbering, groups = _number_channels(constraints, state)
    sites = (*_sites(constraints, numbering), *_sites_of_elements(constraints, numbering))
    consumers = _consumers(constraints, numbering, model, shared)
    groups = tuple(_with_consumers(group, consumers) for group in groups)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    shapes |= {captured.tensors[name]: tuple(value.shape) for name, value in captured.values.items()}
    values = _values(propagated, numbering)
    products = tuple(constraints.products)
    norms = tuple(replace(norm, channels=numbers(norm.channels, numbering)) for norm in constraints.norms)
    return Structure(groups, sites, values, consumers, products, shapes, shared=shared, norms=norms), numbering


def without(structure: Structure, tensors: frozenset[str]) -> Structure:
    """The structure of a model that does not have these tensors."""
    sites = tuple(site for site in structure.sites if site.tensor not in tensors)
    shapes = {name: shape for name, shape in structure.shapes.items() if name not in tensors}
    return replace(structure, sites=sites, shapes=shapes)


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


def _number_channels(constraints: Constraints, state: Resolution) -> tuple[Tensor, tuple[Group, ...]]:
    """Channel numbers, consecutive within each group, for every label (-1: no group), and the groups themselves."""
    numbering = torch.full((constraints.count,), -1)
    groups: list[Group] = []
    start = 0
    group_of, cell = groups_of(constraints, state), cells_of(constraints, state)
    makers: dict[int, list[str]] = {}
    for block in constraints.blocks:
        if block.count:
            makers.setdefault(int(group_of[block.start]), []).append(_layer(block.source))
    order = group_of.argsort(stable=True)
    bounds = torch.searchsorted(group_of[order], torch.tensor([[root, root + 1] for root in sorted(makers)]))
    for root, (low, high) in zip(sorted(makers), bounds.tolist(), strict=True):
        members = order[low:high]
        channels, position = state.root[members].unique(return_inverse=True)
        numbering[members] = start + position
        group = _group(constraints, state, tuple(makers[root]), start, members)
        groups.append(_with_parts(group, cell[channels]))
        start += len(channels)
    return numbering, tuple(groups)


def _group(
    constraints: Constraints, state: Resolution, producers: tuple[str, ...], start: int, members: Tensor
) -> Group:
    channels = state.root[members].unique()
    locked, reasons = _locks(constraints, state.root, channels)
    if len(channels) == 1 and not reasons:
        locked, reasons = torch.ones_like(locked), (why_single(constraints, members),)
    shown, returned = reasons[:REASONS_SHOWN], RETURNED in reasons
    return Group(producers[0], start, len(channels), producers, (), locked, shown, returned)


def _with_parts(group: Group, cell: Tensor) -> Group:
    """The group with the part of each of its channels; all of it stays where parts have lost some to a lock."""
    is_divided = (cell >= 0) & ~group.locked
    if not bool(is_divided.any()):
        return group
    parts = torch.full_like(cell, -1)
    parts[is_divided] = cell[is_divided].unique(return_inverse=True)[1]
    if bool((is_divided | group.locked).all()) and len(torch.bincount(parts[is_divided]).unique()) == 1:
        return replace(group, parts=parts)
    return replace(group, locked=torch.ones_like(group.locked))


def _values(propagated: Propagated, numbering: Tensor) -> tuple[Tensor, ...]:
    """The channels of every value that would be empty without them."""
    found = (numbers(core(labels)[0], numbering).unique() for _, labels in labels_in(propagated))
    return tuple(channels for channels in found if len(channels) and int(channels[0]) >= 0)


def _sites(constraints: Constraints, numbering: Tensor) -> list[Site]:
    found = [Site(name, dim, numbers(labels, numbering)) for (name, dim), labels in constraints.sites.items()]
    divided = [(g.weight, g.outputs if g.transposed else g.inputs) for g in constraints.grouped]
    return found + [Site(weight, 1, numbers(labels, numbering)) for weight, labels in divided]


def _sites_of_elements(constraints: Constraints, numbering: Tensor) -> list[Site]:
    """Free parameters of several dims, now that it is known along which of them their channels lie."""
    found = []
    for name, labels in constraints.elements.items():
        channels = compress(numbers(labels, numbering))
        for dim in varying_dims(channels)[:1]:
            along = channels.movedim(dim, 0).flatten(1).amax(dim=1)
            if not any(key == (name, dim) for key in constraints.sites):
                found.append(Site(name, dim, along))
    return found


def _locks(constraints: Constraints, channel_of: Tensor, channels: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    locked = torch.zeros(len(channels), dtype=torch.bool)
    reasons: dict[str, None] = {}
    for lock in constraints.locks:
        hit = torch.isin(channels, channel_of[lock.labels])
        if bool(hit.any()):
            locked |= hit
            reasons[lock.reason] = None
    return locked, tuple(reasons)


def _consumers(
    constraints: Constraints, numbering: Tensor, model: nn.Module, shared: frozenset[str]
) -> tuple[Consumer, ...]:
    """One consumer per weight: a layer that is called twice, or shares its weight, is refitted once."""
    calls: dict[str, list[Product]] = {}
    divided = {grouped.weight for grouped in constraints.grouped}
    for product in constraints.products:
        if product.input_dim is not None or product.weight in divided:
            calls.setdefault(product.weight, []).append(product)
    places = places_of_biases(constraints.products, model, named_tensors(model), shared)
    found = (_consumer(weight, products, constraints, numbering, places) for weight, products in calls.items())
    return tuple(consumer for consumer in found if bool((consumer.inputs >= 0).any()))


def _consumer(
    weight: str,
    products: list[Product],
    constraints: Constraints,
    numbering: Tensor,
    places: Mapping[Product, str | None],
) -> Consumer:
    first = products[0]
    grouped = next((grouped for grouped in constraints.grouped if grouped.weight == weight), None)
    sites, parts = constraints.sites, 1 if grouped is None else len(grouped.inputs)
    input_dim = 1 - first.output_dim if first.input_dim is None else first.input_dim
    inputs = numbers(sites[weight, input_dim] if grouped is None else grouped.inputs.flatten(), numbering)
    outputs = numbers(sites[weight, first.output_dim] if grouped is None else grouped.outputs.flatten(), numbering)
    found = dict.fromkeys(places[product] for product in products)
    biases = () if None in found else tuple(place for place in found if place is not None)
    return Consumer(_layer(weight), weight, biases, first.kernel, input_dim, inputs, outputs, first.node, parts)


def _with_consumers(group: Group, consumers: tuple[Consumer, ...]) -> Group:
    low, high = group.start, group.start + group.width
    readers = tuple(c.name for c in consumers if bool(((c.inputs >= low) & (c.inputs < high)).any()))
    if readers:
        return replace(group, consumers=readers)
    reasons = (*group.reasons, "no layer reads it")[:REASONS_SHOWN]
    return replace(group, locked=torch.ones_like(group.locked), reasons=reasons)


def _layer(parameter: str) -> str:
    return parameter.removesuffix(".weight")
