"""Groups of channels that can only go together, resolved from the constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from recoup.channels.bias_places import places_of_biases, shared_biases
from recoup.channels.locks import labels_in, lock_double_uses, lock_lone_channels, lock_shared_weights
from recoup.channels.norm_paths import hold_norms
from recoup.channels.parts import cells_of, groups_of, settled
from recoup.channels.propagate import Propagated
from recoup.channels.rectangles import Resolution, resolution
from recoup.channels.structure import REASONS_SHOWN, Consumer, Group, Site, Structure, named_tensors, numbers
from recoup.channels.ties import why_single
from recoup.graph.capture import Captured
from recoup.graph.usage import read_in_other_roles
from recoup.labels.arrays import compress, core, varying_dims
from recoup.labels.constraints import RETURNED, Constraints, Product


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
