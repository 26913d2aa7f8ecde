"""The graph that a standalone result runs, from one that was captured and resized."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from recoup.graph.capture import Captured
from recoup.graph.sizes import Sizes, follow_sizes
from recoup.operators.names import writes
from recoup.operators.record import operator_of
from recoup.plan import GraphPlan


def graph_plan(
    captured: Captured, graph: fx.Graph, constants: Mapping[str, Tensor], sizes: Sizes, unused: frozenset[str]
) -> GraphPlan:
    """`graph`, a resized copy of the captured one, for all sizes it can follow; biases in `unused` are left out."""
    _drop_checks(graph)
    _relax_views(graph)
    _drop_biases(graph, {name for name, target in captured.tensors.items() if target in unused})
    _store_tensors(graph, captured)
    follow_sizes(graph, sizes.numbers)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or writes(node))
    graph.lint()
    signature = captured.signature
    return GraphPlan(graph, constants, signature.names, signature.inputs, signature.outputs, sizes.checks)


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
