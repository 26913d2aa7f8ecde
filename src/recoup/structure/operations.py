"""Names of operations: `conv2d` for aten.conv2d.default and for its in-place twin."""

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
