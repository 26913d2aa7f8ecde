"""Whose memory the values of a graph lie in."""

from __future__ import annotations

from typing import Any

from torch import fx

from recoup.operators.record import operator_of


def memory_of(value: Any) -> fx.Node | None:
    """The value whose memory another one lies in: itself, or what it is a view or a part of."""
    while isinstance(value, fx.Node) and value.op == "call_function" and value.args and shares_memory(value):
        first = value.args[0]
        value = first[0] if isinstance(first, (list, tuple)) and first else first
    return value if isinstance(value, fx.Node) else None


def shares_memory(node: fx.Node) -> bool:
    """Whether what an operation gives may lie in the memory of its first operand."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # a part of a list
    return operator_of(node.target).returns_input or any(part.alias_info is not None for part in schema.returns)
