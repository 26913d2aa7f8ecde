"""Layouts: along which dim of every value in the graph its channels lie, and so what remains of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recoup.channels.structure import Site, Structure, numbers
from recoup.labels.arrays import compress, varying_dims
from recoup.labels.constraints import TensorRef
from recoup.labels.layout import Layout


def layouts(labels: Mapping[str, Any], numbering: Tensor, structure: Structure) -> dict[str, Any]:
    """The layout of every value; a list for a node with several results, None for what is no tensor.

    Only channels that may go count.
    """
    closed = numbering.clone()
    if structure.width:
        closed[(numbering >= 0) & structure.locked[numbering.clamp(min=0)]] = -1
    sites = {site.tensor: site for site in structure.sites}
    return {name: _layout(value, closed, sites) for name, value in labels.items()}


def _layout(value: Any, numbering: Tensor, sites: Mapping[str, Site]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_layout(part, numbering, sites) for part in value]
    if isinstance(value, TensorRef):
        if not value.value.is_floating_point():
            return Layout(value.shape, None, None, value=value.value.cpu())
        site = sites.get(value.name)
        return Layout(value.shape, None, None) if site is None else Layout(value.shape, site.dim, site.channel_of)
    if not isinstance(value, Tensor):
        return None
    shape, dims = tuple(value.shape), varying_dims(value)
    small = value[tuple(slice(None) if d in dims else slice(0, 1) for d in range(value.dim()))]
    channels = compress(numbers(small, numbering))
    dims = varying_dims(channels)
    if not dims:
        return _constant(shape, channels)
    if len(dims) > 1:
        return Layout(shape, None, None, is_box=False)
    return Layout(shape, dims[0], channels.movedim(dims[0], 0).reshape(channels.shape[dims[0]], -1)[:, 0])


def _constant(shape: tuple[int, ...], channels: Tensor) -> Layout:
    """All of it is one channel, or none: a single channel that goes leaves nothing, which no rule lets happen."""
    return Layout(shape, None, None, is_box=not bool((channels >= 0).any()))
