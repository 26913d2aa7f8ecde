"""Channels that stay because of what else their layers' weights are, or because nothing would be left without them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recoup.channels.propagate import Propagated
from recoup.channels.rectangles import Resolution
from recoup.channels.ties import why_alone
from recoup.graph.capture import Captured
from recoup.labels.arrays import core
from recoup.labels.constraints import Constraints


def lock_shared_weights(constraints: Constraints, shared: frozenset[str]) -> None:
    """What a weight is for others, no refit of a layer that reads it may change."""
    for product in constraints.products:
        if product.weight in shared and product.input_dim is not None:
            reason = f"{product.weight} is no layer's alone, so it cannot be refitted"
            constraints.lock(constraints.sites[product.weight, product.input_dim], reason)


def lock_double_uses(constraints: Constraints) -> None:
    """A weight that one layer sums over its rows and another over its columns cannot be refitted for both."""
    dims: dict[str, set[int | None]] = {}
    for product in constraints.products:
        dims.setdefault(product.weight, set()).add(product.input_dim)
    for weight in (name for name, used in dims.items() if len(used) > 1):
        for dim in (0, 1):
            if (weight, dim) in constraints.sites:
                constraints.lock(constraints.sites[weight, dim], f"{weight} is used in two ways")


def lock_lone_channels(propagated: Propagated, state: Resolution, captured: Captured) -> None:
    """A value that consists of a single channel would be empty without it."""
    constraints, nodes = propagated.constraints, {node.name: node for node in captured.graph.nodes}
    known: set[int] = set()
    for name, labels in labels_in(propagated):
        lone = _lone_channel(labels, state)
        if lone >= 0 and lone not in known:
            known.add(lone)
            members = (state.root == lone).nonzero().squeeze(1)
            constraints.lock(torch.tensor([lone]), why_alone(constraints, members, nodes[name]))


def labels_in(propagated: Propagated) -> Iterator[tuple[str, Tensor]]:
    """Labels of every value in the graph, by name; one by one where a node has several results."""
    for name, value in propagated.labels.items():
        for labels in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(labels, Tensor):
                yield name, labels


def _lone_channel(labels: Tensor, state: Resolution) -> int:
    """The channel that a value consists of, or -1."""
    (small,) = core(labels)
    ends = state.open(small.flatten()[[0, -1]] if small.numel() else small.flatten())
    if not len(ends) or int(ends[0]) < 0 or int(ends[0]) != int(ends[-1]):
        return -1
    return int(ends[0]) if bool((state.open(small) == ends[0]).all()) else -1
