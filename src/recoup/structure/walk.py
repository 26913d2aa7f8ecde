"""The walk over the captured graph that fills the ledger."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from recoup.structure.capture import Captured, module_path
from recoup.structure.labels import FIXED, NONE, compress, constant
from recoup.structure.ledger import RETURNED, Ledger, TensorRef
from recoup.structure.rules import Call, find_rule, unknown


def walk(captured: Captured) -> Ledger:
    """Follow labels from the inputs to the outputs; what reaches an output is locked."""
    ledger = Ledger()
    values: dict[fx.Node, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(node, captured)
        elif node.op == "call_function":
            values[node] = _compressed(_follow(node, values, ledger))
        elif node.op == "get_attr":
            values[node] = None
        elif node.op == "output":
            fx.node.map_arg(node.args, lambda result: _lock_output(values[result], ledger))
    return ledger


def operation_name(target: Any) -> str:
    """`conv2d` for aten.conv2d.default; the in-place twin of an operation has the same name."""
    packet = getattr(target, "overloadpacket", target)
    name: str = getattr(packet, "__name__", str(packet))
    return name.removesuffix("_") if not name.endswith("__") else name


def shape_of(value: Any) -> Any:
    """Size of a recorded result, or a list of sizes."""
    if isinstance(value, Tensor):
        return torch.Size(value.shape)
    return [shape_of(part) for part in value] if isinstance(value, (list, tuple)) else None


def _placeholder(node: fx.Node, captured: Captured) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    if node.name in captured.tensors:
        return TensorRef(captured.tensors[node.name], tuple(value.shape))
    return constant(value.shape, FIXED if value.numel() > 1 else NONE)


def _follow(node: fx.Node, values: dict[fx.Node, Any], ledger: Ledger) -> Any:
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    name, shape = operation_name(node.target), shape_of(node.meta.get("val"))
    call = Call(node.target, name, module_path(node), node.name, tuple(args), dict(kwargs), shape)
    try:
        result = find_rule(node.target, name)(call, ledger)
    except (TypeError, ValueError, IndexError, RuntimeError, AttributeError):  # a form of the call no rule expects
        return unknown(call, ledger)
    return result if _shapes_agree(result, shape) else unknown(call, ledger)


def _shapes_agree(result: Any, shape: Any) -> bool:
    if isinstance(result, Tensor):
        return tuple(result.shape) == tuple(shape)
    if isinstance(result, (list, tuple)):
        return all(_shapes_agree(*pair) for pair in zip(result, shape, strict=False))
    return True


def _compressed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return compress(value)
    return [_compressed(part) for part in value] if isinstance(value, (list, tuple)) else value


def _lock_output(value: Any, ledger: Ledger) -> None:
    for part in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(part, (Tensor, TensorRef)):
            ledger.lock(ledger.labels_of(part), RETURNED)
