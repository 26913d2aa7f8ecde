"""The head of a classifier: the linear layers, one behind the other, that end in the scores it returns."""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from recoup.channels.structure import Structure
from recoup.graph.ancestry import makers
from recoup.graph.capture import Captured, input_nodes
from recoup.operators.record import operator_of


def read_by_head(structure: Structure, captured: Captured) -> tuple[str, ...]:
    """Names of the groups that a layer of the head reads; empty for a model whose output is no layer's.

    The last layer, of whatever kind, belongs to the head, and so does every linear layer before it. Between them
    anything may stand that is made of the one layer's outputs alone.
    """
    weights = {product.node: product.weight for product in structure.products}
    sources = {*weights, *(node.name for node in input_nodes(captured))}
    found = {weights[node] for result in _results(captured.graph) for node in _layers(result, sources)}
    readers = {consumer.name for consumer in structure.consumers if consumer.weight in found}
    return tuple(group.name for group in structure.groups if readers & set(group.consumers))


def _results(graph: fx.Graph) -> list[fx.Node]:
    return [node for output in graph.nodes if output.op == "output" for node in output.all_input_nodes]


def _layers(node: fx.Node | None, sources: Container[str]) -> list[str]:
    """Nodes of the head's layers, from the last one on; `sources` are layers and what the model is given."""
    found: list[str] = []
    while node is not None and len(last := makers(node, lambda node: node.name in sources)) == 1:
        (node,) = last
        if node.op == "placeholder":
            break
        layer = operator_of(node.target).layer
        is_linear = layer is not None and not layer.has_window
        if found and not is_linear:
            break
        found.append(node.name)
        node = _source(node) if is_linear else None
    return found


def _source(node: fx.Node) -> fx.Node | None:
    """The computed value that an operation reads first."""
    return next((value for value in node.all_input_nodes if value.op == "call_function"), None)
