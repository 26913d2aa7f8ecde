"""Computed weights: what a network makes of its parameters alone is a constant in eval mode, and is stored as one.

Weight standardisation, weight norm, a packed projection that is cut in three, a reparametrised kernel: the layer that
multiplies by such a weight gets a stored tensor in its place, which can be cut and refitted like any other. The model's
own class has no place for that tensor, so the result is then a standalone graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from recoup.errors import CaptureError
from recoup.graph.capture import Captured
from recoup.graph.copies import copied
from recoup.graph.runner import run
from recoup.graph.usage import read_in_other_roles, weights_of_layers, written_tensors
from recoup.operators.names import is_random, writes
from recoup.operators.record import operator_of

FOLDED = "folded."


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The captured graph with stored tensors in the place of computed ones, and the names of these."""

    captured: Captured
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A weight to be stored under a name of its own, what it is now, and who is to read the stored one."""

    name: str
    source: fx.Node
    readers: tuple[fx.Node, ...]


def fold(captured: Captured, *, untie: bool = True) -> Folded:
    """`captured` with every weight that depends on parameters alone computed and stored as `folded.<node>`.

    With `untie`, so is a layer's weight that something else reads too: a table of embeddings, the same transposed.
    """
    constant = _constant_nodes(captured)
    wanted = [*_computed_weights(captured.graph, constant), *(_shared_weights(captured) if untie else ())]
    if not wanted:
        return Folded(captured, ())
    graph, twins = copied(captured.graph)
    values = _evaluate(captured, constant, [weight.source for weight in wanted])
    first = next(iter(graph.nodes))
    computed = {twins[node] for node in constant if node.op == "call_function"}
    tensors, held = dict(captured.tensors), dict(captured.values)
    for weight in wanted:
        with graph.inserting_before(first):
            place = graph.placeholder(weight.name.replace(".", "_"))
        place.meta["val"] = weight.source.meta["val"]
        value = torch.nn.Parameter(values[weight.source].clone())
        tensors[place.name], held[place.name] = weight.name, value
        for reader in weight.readers:
            twins[reader].replace_input_with(twins[weight.source], place)
    # What nobody reads in the model's own code stays: the graph has to match that of the class, operation by operation.
    graph.eliminate_dead_code(is_impure_node=lambda node: node not in computed)
    names = tuple(weight.name for weight in wanted)
    return Folded(replace(captured, graph=graph, tensors=tensors, values=held), names)


def _computed_weights(graph: fx.Graph, constant: set[fx.Node]) -> list[_Weight]:
    sources: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in constant:
            continue
        for source in _weights_among(node):
            if isinstance(source, fx.Node) and source.op == "call_function" and source in constant:
                sources[source] = None
    return [
        _Weight(FOLDED + source.name, source, tuple(user for user in source.users if user not in constant))
        for source in sources
    ]


def _weights_among(node: fx.Node) -> Iterator[Any]:
    """What a call has in the places of stored tensors, one of which may be a list of them."""
    for place in operator_of(node.target).weights:
        given = node.args[place] if len(node.args) > place else None
        yield from given if isinstance(given, (list, tuple)) else [given]


def _shared_weights(captured: Captured) -> list[_Weight]:
    """Stored weights of layers that something of another kind reads: transposed ones, and all if it is no layer."""
    names, readers = read_in_other_roles(captured), dict[tuple[fx.Node, bool], list[fx.Node]]()
    for node, weight in weights_of_layers(captured):
        layer = operator_of(node.target).layer
        if captured.tensors[weight.name] in names and layer is not None:
            readers.setdefault((weight, layer.transposed), []).append(node)
    found = []
    for (weight, transposed), calls in readers.items():
        layers = {*calls, *readers.get((weight, not transposed), ())}
        if transposed or set(weight.users) - layers:
            name = f"{FOLDED}{weight.name}{'_transposed' if transposed else ''}"
            found.append(_Weight(name, weight, tuple(calls)))
    return found


def _constant_nodes(captured: Captured) -> set[fx.Node]:
    """Nodes that depend on no input of the model."""
    constant: set[fx.Node] = set()
    moving = written_tensors(captured)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if node.name in captured.tensors and captured.tensors[node.name] not in moving:
                constant.add(node)
        elif node.op == "call_function" and _is_constant(node, constant):
            constant.add(node)
    return constant


def _is_constant(node: fx.Node, constant: set[fx.Node]) -> bool:
    sources = node.all_input_nodes
    return bool(sources) and all(source in constant for source in sources) and not is_random(node)


def _evaluate(captured: Captured, constant: set[fx.Node], wanted: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Values of constant nodes, computed in the graph's order, as some are written into after they are made."""
    nodes = [node for node in captured.graph.nodes if node in constant]
    for node in nodes:
        if writes(node) and any(source.op == "placeholder" for source in node.all_input_nodes):
            raise CaptureError(f"{node.name} writes into a parameter during the forward pass; take that out of it.")
    stored = {node.name: captured.values[node.name].detach() for node in nodes if node.op == "placeholder"}
    with torch.no_grad():
        known = run(nodes, stored, _nothing)
    return {node: known[node.name].clone() for node in wanted}


def _nothing(name: str) -> Tensor:
    raise CaptureError(f"{name} is stored in a region of its own, which cannot be computed beforehand.")
