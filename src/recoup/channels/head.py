"""The head of a classifier: the linear layers, one behind the other, that end in the scores it returns."""

from __future__ import annotations

from torch import fx

from recoup.channels.groups import Structure
from recoup.graph.capture import Captured
from recoup.operators.names import operation_name
from recoup.operators.record import operator_of

# Turn scores into probabilities: what is returned is the scores' all the same.
PROBABILITIES = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax"})


def read_by_head(structure: Structure, captured: Captured) -> tuple[str, ...]:
    """Names of the groups that a layer of the head reads; empty for a model whose output is no layer's.

    The last layer, of whatever kind, belongs to the head, and so does every linear layer before it. Between them
    anything may stand that acts on elements or channels by themselves, moves them, or pools.
    """
    weights = {product.node: product.weight for product in structure.products if product.input_dim is not None}
    found = {weights[node] for result in _results(captured.graph) for node in _layers(result) if node in weights}
    readers = {consumer.name for consumer in structure.consumers if consumer.weight in found}
    return tuple(group.name for group in structure.groups if readers & set(group.consumers))


def _results(graph: fx.Graph) -> list[fx.Node]:
    return [node for output in graph.nodes if output.op == "output" for node in output.all_input_nodes]


def _layers(node: fx.Node | None) -> list[str]:
    """Nodes of the head's layers, from the last one on."""
    found: list[str] = []
    while node is not None and node.op == "call_function":
        layer = operator_of(node.target).layer
        if (layer is None and not _passes(node)) or (layer is not None and layer.has_window and found):
            break
        if layer is not None:
            found.append(node.name)
        node = None if layer is not None and layer.has_window else _source(node)
    return found


def _passes(node: fx.Node) -> bool:
    record = operator_of(node.target)
    if sum(value.op == "call_function" for value in node.all_input_nodes) != 1:
        return False
    keeps = record.is_pointwise or record.is_movement or record.is_channelwise or record.is_pooling
    return keeps or operation_name(node.target) in PROBABILITIES


def _source(node: fx.Node) -> fx.Node | None:
    """The computed value that an operation reads first."""
    return next((value for value in node.all_input_nodes if value.op == "call_function"), None)
