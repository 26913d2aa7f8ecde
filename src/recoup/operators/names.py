"""Names of operations: `conv2d` for aten.conv2d.default and for its in-place twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def operation_name(target: Any) -> str:
    """The operation's name without overload; the in-place twin of an operation has the same name.

    An operation of another library than torch's has that library's name in front: `mine::flip`.
    """
    packet = getattr(target, "overloadpacket", target)
    name: str = getattr(packet, "__name__", str(packet))
    library = getattr(target, "namespace", "aten")
    name = name.removesuffix("_") if not name.endswith("__") else name
    return name if library in ("aten", "_operator") else f"{library}::{name}"


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a node by position or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
