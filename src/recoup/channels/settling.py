"""Settling: what makes the channels of a normalised stream is put so that those that are left have its statistics.

The masked original leaves the others at zero, and where the mean is taken off, centres what is left. What is
normalised over n of m channels then differs by the factor sqrt(m / n) alone, and the gain makes up for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from recoup.channels.structure import Group, Site, Structure
from recoup.plan import Centred, centre


def settled(
    structure: Structure, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], keep: Tensor
) -> dict[str, Tensor]:
    """`weights`, and of `tensors` those that have to change with them, for what `keep` leaves of normalised streams."""
    found = dict(weights)
    for site, inside, is_centred in _places(structure, keep):
        value = found.get(site.tensor, tensors.get(site.tensor))
        if value is not None:
            gone = inside & ~keep[site.channel_of.clamp(min=0)]
            value = value.detach().index_fill(site.dim, gone.nonzero().squeeze(1).to(value.device), 0.0)
            kept = (inside & ~gone).nonzero().squeeze(1)
            found[site.tensor] = centre(value, Centred(site.tensor, site.dim, kept)) if is_centred else value
    return found


def centred(structure: Structure, weights: Mapping[str, Tensor], keep: Tensor) -> tuple[Centred, ...]:
    """What the masked original has to have centred."""
    return tuple(
        Centred(site.tensor, site.dim, (inside & keep[site.channel_of.clamp(min=0)]).nonzero().squeeze(1))
        for site, inside, is_centred in _places(structure, keep)
        if is_centred and (site.tensor in weights or site.tensor in structure.shapes)
    )


def with_whole_streams(structure: Structure) -> Structure:
    """The structure without those streams that are not centred as one: a norm or a maker sees but a part of them."""
    found = {}
    for group in structure.groups:
        norms = [norm for norm in structure.norms if norm.is_centred and bool(_inside(norm.channels, group).any())]
        sides = [norm.channels for norm in norms] + [site.channel_of for site in _sites(structure, group)]
        if norms and not all(_is_even(side, group) for side in sides):
            found[group.name] = f"{norms[0].site} normalises over channels: it sees a part of them"
    return structure.lock(found) if found else structure


def _places(structure: Structure, keep: Tensor) -> Iterator[tuple[Site, Tensor, bool]]:
    """Everything that makes channels of a stream of which some go, which of its indices do, and whether to centre."""
    for group in structure.groups:
        if bool(keep[group.channels].all()):
            continue
        norms = [norm for norm in structure.norms if bool(_inside(norm.channels, group).any())]
        for site in _sites(structure, group) if norms else ():
            yield site, _inside(site.channel_of, group), any(norm.is_centred for norm in norms)


def _sites(structure: Structure, group: Group) -> Iterator[Site]:
    """Where tensors make channels of a group that is normalised, new biases included."""
    norms = [norm for norm in structure.norms if bool(_inside(norm.channels, group).any())]
    sources = frozenset[str]().union(*(norm.sources for norm in norms))
    read = {(consumer.weight, consumer.input_dim) for consumer in structure.consumers}
    new = ((name, c.outputs) for c in structure.consumers for name in c.biases if name not in structure.shapes)
    sites = [*structure.sites, *(Site(name, 0, outputs) for name, outputs in dict(new).items())]
    for site in sites:
        is_made = site.tensor in sources and (site.tensor, site.dim) not in read
        if is_made and bool(_inside(site.channel_of, group).any()):
            yield site


def _inside(channel_of: Tensor, group: Group) -> Tensor:
    return (channel_of >= group.start) & (channel_of < group.start + group.width)


def _is_even(channel_of: Tensor, group: Group) -> bool:
    """Whether all channels of a group are there, each as often as the others."""
    counts = torch.bincount(channel_of[_inside(channel_of, group)] - group.start, minlength=group.width)
    return bool((counts == counts[0]).all())
