"""Numbers that the code computes from constants alone, to pick elements by.

Where a pair of tokens stands in a table of relative positions is an example. Such numbers are the same at every call of
a size, so to index by them is a movement of elements, as it is by numbers that the model stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from recoup.graph.capture import Captured
from recoup.graph.runner import call
from recoup.operators.names import operation_name, writes

# What picks elements, by all its operands but the first.
PICKS = ("index", "index_select", "_unsafe_index", "gather", "take_along_dim")

# Constants of more elements are not computed.
MOST_ELEMENTS = 1 << 22


def index_numbers(captured: Captured) -> dict[str, Any]:
    """By the name of its node, every value that is made of constants alone and of no other use than to pick by."""
    known: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and captured.tensors.get(node.name) in captured.constants:
            known[node] = captured.values[node.name].cpu()
        elif node.op == "call_function" and _is_plain(node) and known.keys() >= set(node.all_input_nodes):
            known[node] = call(node, known.__getitem__)
    found: set[fx.Node] = set()
    for node in reversed(known):
        if node.op == "call_function" and node.users and all(_picks(user, node, found) for user in node.users):
            found.add(node)
    return {node.name: known[node] for node in known if node in found}


def _picks(user: fx.Node, node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a node is there to pick by, or to compute what is."""
    is_picked_from = bool(user.args) and user.args[0] is node
    return user in found or (operation_name(user.target) in PICKS and not is_picked_from)


def _is_plain(node: fx.Node) -> bool:
    """Whether an operation gives the same tensors of known sizes each time, and writes into none."""
    tags = getattr(node.target, "tags", ())
    values = list(_tensors(node.meta.get("val")))
    sizes = [size for value in values for size in value.shape]
    return (
        bool(values)
        and not writes(node)
        and torch.Tag.nondeterministic_seeded not in tags
        and all(isinstance(size, int) for size in sizes)
        and all(value.numel() <= MOST_ELEMENTS for value in values)
    )


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
