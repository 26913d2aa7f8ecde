"""Graphs without operations that write into values: each value can then be kept, shared and computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from recoup.operators.names import operation_name, writes
from recoup.operators.record import operator_of


def make_pure(graph: fx.Graph) -> bool:
    """Turn in-place operations on values nobody else reads into plain ones; whether none are left."""
    for node in [node for node in graph.nodes if node.op == "call_function" and writes(node)]:
        twin = plain_twin(node.target)
        first = node.args[0] if node.args else None
        if twin is None or not isinstance(first, fx.Node) or not _is_own(first, node):
            return False
        node.target = twin
    return True


def _is_own(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a value is fresh and nobody but `reader` reads it, so that nobody sees it overwritten."""
    schema = getattr(value.target, "_schema", None)
    is_fresh = schema is not None and all(result.alias_info is None for result in schema.returns)
    is_fresh = is_fresh and not operator_of(value.target).returns_input
    return value.op == "call_function" and is_fresh and set(value.users) == {reader}


def plain_twin(target: Any) -> Callable[..., Any] | None:
    """aten.relu.default for aten.relu_.default; None for an operation of another library."""
    packet = getattr(torch.ops.aten, operation_name(target), None) if target.namespace == "aten" else None
    return getattr(packet, target._overloadname, None) if packet is not None else None
