"""Graphs and their operations: names (`conv2d` for aten.conv2d.default and its in-place twin), writing, copying."""

from __future__ import annotations

from typing import Any

from torch import fx


def operation_name(target: Any) -> str:
    """The operation's name without overload; the in-place twin of an operation has the same name."""
    packet = getattr(target, "overloadpacket", target)
    name: str = getattr(packet, "__name__", str(packet))
    return name.removesuffix("_") if not name.endswith("__") else name


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and the new node for each old one but the output."""
    copy = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, twins))
    return copy, twins
