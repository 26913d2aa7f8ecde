"""The standalone form of a model: a module made of its captured graph, for classes that cannot hold other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._pytree import tree_flatten_spec
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from recoup.errors import CaptureError
from recoup.graph.batch_dim import Scaling, follow_batch
from recoup.graph.capture import Captured
from recoup.graph.copies import copied
from recoup.operators.names import writes
from recoup.operators.record import operator_of
from recoup.plan import GraphPlan


class Standalone(fx.GraphModule):
    """A plain module that runs a graph of ATen operations in eval mode.

    Parameters and buffers have the names they had in the model it was captured from; what the capture computed from
    them alone is stored under `folded`, constants of the code under `constants`. It trains and exports like any other
    module, but batch norms stay in eval mode and dropout stays off.
    """


def standalone(plan: GraphPlan, tensors: Mapping[str, Tensor]) -> Standalone:
    """The module that runs the plan's graph on `tensors`, by dotted name."""
    graph, _ = copied(plan.graph)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(list(plan.names), plan.inputs, plan.outputs)))
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    held = {**tensors, **{name: value.to(device) for name, value in plan.constants.items()}}
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    if used - held.keys():
        raise CaptureError(
            "a part of the forward pass runs in a region of its own (no_grad or autocast within the model), which a "
            "standalone graph cannot hold. Prune with keep_class=True, or take the region out."
        )
    return Standalone({name: held[name] for name in used}, graph, class_name="Standalone")


def entering(host: Standalone, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names they have in the graph."""
    places = [node.name for node in host.graph.nodes if node.op == "placeholder"]
    form = host.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]  # a standalone form has one
    return dict(zip(places, tree_flatten_spec((list(args), dict(kwargs)), form), strict=True))


def graph_plan(
    captured: Captured, graph: fx.Graph, constants: Mapping[str, Tensor], scaling: Scaling, unused: frozenset[str]
) -> GraphPlan:
    """`graph`, a resized copy of the captured one, as a function of any batch; biases in `unused` are left out."""
    _drop_checks(graph)
    _relax_views(graph)
    _drop_biases(graph, {name for name, target in captured.tensors.items() if target in unused})
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name not in captured.tensors]
    _store_tensors(graph, captured)
    if scaling:
        follow_batch(graph, scaling, _batched_input(inputs))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or writes(node))
    graph.lint()
    signature = captured.signature
    return GraphPlan(graph, constants, signature.names, signature.inputs, signature.outputs)


def with_biases(captured: Captured) -> tuple[Captured, frozenset[str]]:
    """`captured` with a bias of zeros wherever a dense layer has none, and the names of these."""
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
    bias, groups = layer.argument(node, "bias"), layer.argument(node, "groups", 1)
    weight = node.args[1]
    is_stored = isinstance(weight, fx.Node) and weight.name in captured.tensors
    return bias is None and bool(groups == 1) and is_stored


def _new_bias(graph: fx.Graph, captured: Captured, weight: str) -> fx.Node:
    value = captured.values[weight]
    with graph.inserting_before(next(iter(graph.nodes))):
        place = graph.placeholder(f"new_bias_of_{weight}")
    user = next(iter(node for node in graph.nodes if node.op == "call_function" and _reads(node, weight)))
    layer = operator_of(user.target).layer
    size = value.shape[1 if layer is not None and layer.transposed else 0]
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


def _drop_checks(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and operator_of(node.target).is_check:
            graph.erase_node(node)


def _relax_views(graph: fx.Graph) -> None:
    """A view that the original sizes allow may need a copy at others."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default


def _drop_biases(graph: fx.Graph, names: set[str]) -> None:
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in names:
            node.replace_all_uses_with(None)
            graph.erase_node(node)


def _store_tensors(graph: fx.Graph, captured: Captured) -> None:
    """Parameters, buffers and constants become attributes of the module."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in captured.tensors:
            with graph.inserting_before(node):
                place = graph.get_attr(captured.tensors[node.name])
            node.replace_all_uses_with(place)
            graph.erase_node(node)


def _batched_input(inputs: list[fx.Node]) -> fx.Node:
    for node in inputs:
        value: Any = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == 1:
            return node
    raise CaptureError("no input of the model has a batch dimension, so a standalone graph cannot follow the batch.")
