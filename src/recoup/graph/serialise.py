"""The graph of a standalone result as plain data, and back: names, numbers, and nothing that runs code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import treespec_dumps, treespec_loads

from recoup.errors import ArtefactError
from recoup.plan import GraphPlan

_PYTHON = {f"operator.{name}": getattr(operator, name) for name in ("getitem", "add", "mul", "sub", "floordiv")}
# Arguments that are names in the torch namespace.
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def graph_to_json(plan: GraphPlan) -> dict[str, Any]:
    """Plain data, ready for `json.dumps`.

    Raises:
        ArtefactError: an operation or an argument has no plain form.
    """
    try:
        trees = {"inputs": treespec_dumps(plan.inputs), "outputs": treespec_dumps(plan.outputs)}
    except (NotImplementedError, ValueError, TypeError) as error:
        raise ArtefactError(
            f"what the model takes or returns has no plain form ({error}). Return tensors in tuples or dicts, or "
            "register the class with torch.utils._pytree.register_pytree_node and a serialized_type_name."
        ) from error
    return {"names": list(plan.names), **trees, "nodes": [_node_to_json(node) for node in plan.graph.nodes]}


def graph_from_json(data: dict[str, Any]) -> GraphPlan:
    """The plan of a standalone module, whose constants are among its saved tensors."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for entry in data["nodes"]:
        args, kwargs = _decode(entry["args"], nodes), _decode(entry["kwargs"], nodes)
        target = _target(entry["target"]) if entry["op"] == "call_function" else entry["target"]
        nodes[entry["name"]] = graph.create_node(entry["op"], target, tuple(args), kwargs, name=entry["name"])
    return GraphPlan(graph, {}, tuple(data["names"]), treespec_loads(data["inputs"]), treespec_loads(data["outputs"]))


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    target = _name_of(node.target) if node.op == "call_function" else str(node.target)
    return {
        "op": node.op,
        "name": node.name,
        "target": target,
        "args": _encode(list(node.args)),
        "kwargs": {name: _encode(value) for name, value in node.kwargs.items()},
    }


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = next((name for name, function in _PYTHON.items() if function is target), None)
    if name is None:
        raise ArtefactError(f"the operation {target} has no plain form, so the standalone result cannot be saved.")
    return name


def _target(name: str) -> Any:
    """The operation of that name; only operators registered with torch, and a few of Python's."""
    if name in _PYTHON:
        return _PYTHON[name]
    parts = name.split(".")
    found: Any = torch.ops
    try:
        for part in parts if len(parts) == 3 else []:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise ArtefactError(
            f"this version of torch has no operation {name}. Use the version the result was saved with."
        )
    return found


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_encode(part) for part in value]
    for kind, cls in _NAMED.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArtefactError(f"the argument {value!r} has no plain form, so the standalone result cannot be saved.")


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(part, nodes) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, name),) = value.items()
        if kind == "node" and isinstance(name, str):
            return nodes[name]
        if kind in _NAMED and isinstance(name, str):
            return getattr(torch, name)
        if kind == "device" and isinstance(name, str):
            return torch.device("cpu")
    return {name: _decode(part, nodes) for name, part in value.items()}
