"""Exact copies of channels, installed by what the library knows of who makes and who reads a channel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recoup.channels.parts import gathered, spread
from recoup.channels.structure import Group, Structure, named_tensors
from recoup.graph.folding import FOLDED
from recoup.tracing.trace import Traced


def kinds(structure: Structure) -> list[tuple[int, ...]]:
    """For every channel, its part and the places it is found in: a copy of another must be found in the same ones."""
    found: list[list[int]] = [[] for _ in range(structure.width)]
    for number, site in enumerate(structure.sites):
        for channel in site.channel_of[site.channel_of >= 0].tolist():
            found[channel].append(number)
    for group in structure.groups:
        for place, part in enumerate([] if group.parts is None else group.parts.tolist()):
            found[group.start + place].insert(0, part)
    return [tuple(places) for places in found]


def with_twins(structure: Structure, keep: Tensor) -> tuple[Tensor, Tensor]:
    """`keep` and, for every pruned channel, a kept one of its kind; a channel without one is kept after all."""
    kind, keep, twin = kinds(structure), keep.clone(), torch.arange(structure.width)
    for group in structure.prunable:
        members = range(group.start, group.start + group.width)
        for channel in members:
            others = [c for c in members if keep[c] and kind[c] == kind[channel] and not group.locked[c - group.start]]
            if not keep[channel] and others:
                twin[channel] = others[channel % len(others)]
            elif not keep[channel]:
                keep[channel] = True
    return structure.refill(keep, torch.arange(structure.width)), twin


def make_copies(model: nn.Module, structure: Structure, twin: Tensor) -> None:
    """Give every channel the parameters of its twin, where it is made."""
    consumed = {(consumer.weight, consumer.input_dim) for consumer in structure.consumers}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for site in structure.sites:
        if (site.tensor, site.dim) not in consumed and site.tensor in tensors:
            _copy(tensors[site.tensor].data, site.dim, site.channel_of, twin)


def pairings(structure: Structure) -> Iterator[tuple[Tensor, Tensor]]:
    """Masks that keep one of each pair of channels of a kind, with the twins: neighbours first, then a half apart."""
    kind = kinds(structure)
    for apart in (False, True):
        keep, twin = structure.keep_all(), torch.arange(structure.width)
        for group in structure.prunable:
            for a, b in _pairs(group, kind, apart=apart):
                keep[b], twin[b] = False, a
        yield structure.refill(keep, torch.arange(structure.width)), twin


def copy_computed(model: nn.Module, structure: Structure, twin: Tensor) -> None:
    """The same for weights that are computed: parameters that belong to no channel by themselves, by their size."""
    known = {site.tensor for site in structure.sites}
    hidden = [tensor.data for name, tensor in model.named_parameters() if name not in known and tensor.dim()]
    for site in (site for site in structure.sites if site.tensor.startswith(FOLDED) and site.dim == 0):
        for data in (data for data in hidden if data.shape[0] == len(site.channel_of)):
            _copy(data, 0, site.channel_of, twin)


def merged(traced: Traced, twin: Tensor) -> nn.Module:
    """A copy of what is worked on in which whoever read a pruned channel reads its twin in its place."""
    host = copy.deepcopy(traced.host)
    tensors = named_tensors(host)
    for consumer in (c for c in traced.structure.consumers if c.weight in tensors):  # others the class computes
        weight = consumer.spread(tensors[consumer.weight].data).clone()
        for channel in consumer.inputs.unique().tolist():
            if channel >= 0 and int(twin[channel]) != channel:
                here, there = _places(consumer.inputs, channel, twin)
                moved = weight.index_select(consumer.input_dim, here)
                weight.index_add_(consumer.input_dim, there, moved)
                weight.index_fill_(consumer.input_dim, here, 0.0)
        tensors[consumer.weight].data.copy_(consumer.gathered(weight))
    return host


def install(
    model: nn.Module, trace: Callable[[nn.Module], Traced], is_same: Callable[[nn.Module], bool]
) -> dict[str, int] | None:
    """Make channels of `model` copies of others, and tell how many of each group are enough.

    None where that cannot be done: `is_same` says whether a network in which copies are not read loses nothing.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traced = trace(model)
    structure = traced.structure
    is_computed = any(site.tensor.startswith(FOLDED) for site in structure.sites)
    for keep, twin in pairings(structure):
        if bool(keep.all()):
            return None
        make_copies(model, structure, twin)
        copy_computed(model, structure, twin)
        now = trace(model) if is_computed or traced.form is not None else traced
        if now.structure.width == len(keep) and is_same(merged(now, twin)):
            return {group.name: int(keep[group.channels].sum()) for group in structure.prunable}
        model.load_state_dict(before)
    return None


def _pairs(group: Group, kind: list[Any], *, apart: bool) -> Iterator[tuple[int, int]]:
    classes: dict[Any, list[int]] = {}
    for place in (~group.locked).nonzero().squeeze(1).tolist():
        classes.setdefault(kind[group.start + place], []).append(group.start + place)
    for members in classes.values():
        half = len(members) // 2
        firsts, seconds = (members[:half], members[half:]) if apart else (members[::2], members[1::2])
        yield from zip(firsts, seconds, strict=False)


def _copy(data: Tensor, dim: int, channel_of: Tensor, twin: Tensor) -> None:
    runs = len(channel_of) if channel_of.dim() == 2 else 1
    whole = spread(data, runs).clone()
    for channel in channel_of.unique().tolist():
        if channel >= 0 and int(twin[channel]) != channel:
            here, there = _places(channel_of.flatten(), channel, twin)
            if len(here) == len(there):
                whole.index_copy_(dim, here, whole.index_select(dim, there))
    data.copy_(gathered(whole, runs))


def _places(channel_of: Tensor, channel: int, twin: Tensor) -> tuple[Tensor, Tensor]:
    """Where a channel lies, and where its twin does."""
    here, there = ((channel_of == c).nonzero().squeeze(1) for c in (channel, int(twin[channel])))
    return here, there
