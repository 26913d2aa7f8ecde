"""A bias for every layer that may be refitted: one of zeros where the model has none."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from recoup.graph.capture import Captured
from recoup.graph.copies import copied
from recoup.operators.record import operator_of


def with_biases(captured: Captured) -> tuple[Captured, frozenset[str]]:
    """`captured` with a bias of zeros wherever a layer has none, but for depthwise ones, and the names of these."""
    graph, _ = copied(captured.graph)
    tensors, values = dict(captured.tensors), dict(captured.values)
    places: dict[str, fx.Node] = {}
    for node in [node for node in graph.nodes if _lacks_bias(node, captured)]:
        weight = node.args[1].name
        if weight not in places:
            places[weight] = _new_bias(graph, captured, weight)
            name = _name_of_bias(captured.tensors[weight], set(captured.tensors.values()))
            tensors[places[weight].name], values[places[weight].name] = name, places[weight].meta["val"]
        node.args = (*node.args[:2], places[weight], *node.args[3:])
    added = frozenset(tensors[place.name] for place in places.values())
    return replace(captured, graph=graph, tensors=tensors, values=values), added


def _lacks_bias(node: fx.Node, captured: Captured) -> bool:
    layer = operator_of(node.target).layer if node.op == "call_function" else None
    if layer is None or not layer.adds_bias:
        return False
    weight = node.args[1]
    if (
        layer.argument(node, "bias") is not None
        or not isinstance(weight, fx.Node)
        or weight.name not in captured.tensors
    ):
        return False
    return bool(layer.argument(node, "groups", 1) == 1) or captured.values[weight.name].shape[1] > 1


def _new_bias(graph: fx.Graph, captured: Captured, weight: str) -> fx.Node:
    value = captured.values[weight]
    with graph.inserting_before(next(iter(graph.nodes))):
        place = graph.placeholder(f"new_bias_of_{weight}")
    user = next(iter(node for node in graph.nodes if node.op == "call_function" and _reads(node, weight)))
    layer = operator_of(user.target).layer
    assert layer is not None
    size = value.shape[1] * layer.argument(user, "groups", 1) if layer.transposed else value.shape[0]
    bias = torch.zeros(size, dtype=value.dtype, device=value.device)
    place.meta["val"] = torch.nn.Parameter(bias, requires_grad=value.requires_grad)
    return place


def _reads(node: fx.Node, weight: str) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], fx.Node) and node.args[1].name == weight


def _name_of_bias(weight: str, taken: set[str]) -> str:
    name = f"{weight.removesuffix('.weight')}.bias" if weight.endswith(".weight") else f"{weight}_bias"
    while name in taken:
        name += "_"
    return name
