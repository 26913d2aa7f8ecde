"""Computed weights: what a network makes of its parameters alone is a constant in eval mode, and is stored as one.

Weight standardisation, weight norm, a packed projection that is cut in three, a reparametrised kernel: the layer that
multiplies by such a weight gets a stored tensor in its place, which can be cut and refitted like any other. The model's
own class has no place for that tensor, so the result is then a standalone graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from recoup.errors import CaptureError
from recoup.graph.capture import Captured
from recoup.graph.copies import copied
from recoup.graph.runner import run
from recoup.graph.usage import read_in_other_roles, weights_of_layers, written_tensors
from recoup.operators.names import writes
from recoup.operators.record import operator_of

FOLDED = "folded."


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The captured graph with stored tensors in the place of computed ones, and the names of these."""

    captured: Captured
    names: tuple[str, ...]


def fold(captured: Captured, *, untie: bool = True) -> Folded:
    """`captured` with every weight that depends on parameters alone computed and stored as `folded.<node>`.

    With `untie`, so is a layer's weight that something else reads too: a table of embeddings, the same transposed.
    """
    constant = _constant_nodes(captured)
    places = _computed_places(captured.graph, constant)
    shared = _shared_places(captured) if untie else []
    wanted = list(dict.fromkeys(source for _, source in (*places, *shared)))
    if not wanted:
        return Folded(captured, ())
    graph, twins = copied(captured.graph)
    values = _evaluate(captured, constant, wanted)
    first = next(iter(graph.nodes))
    computed = {twins[node] for node in constant if node.op == "call_function"}
    tensors, held = dict(captured.tensors), dict(captured.values)
    for source in wanted:
        with graph.inserting_before(first):
            place = graph.placeholder(f"{FOLDED}{source.name}".replace(".", "_"))
        place.meta["val"] = source.meta["val"]
        tensors[place.name], held[place.name] = FOLDED + source.name, torch.nn.Parameter(values[source])
        layers = {twins[node] for node, weight in shared if weight is source}
        for user in list(twins[source].users):
            if user in layers or (not layers and user not in computed):
                user.replace_input_with(twins[source], place)
    graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output") or _stays(node, computed)
    )
    names = tuple(FOLDED + source.name for source in wanted)
    return Folded(replace(captured, graph=graph, tensors=tensors, values=held), names)


def _stays(node: fx.Node, computed: set[fx.Node]) -> bool:
    return node not in computed and node.op == "call_function" and node.is_impure()


def _computed_places(graph: fx.Graph, constant: set[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node in constant:
            continue
        for place in operator_of(node.target).weights:
            source = node.args[place] if len(node.args) > place else None
            if isinstance(source, fx.Node) and source.op == "call_function" and source in constant:
                found.append((node, source))
    return found


def _shared_places(captured: Captured) -> list[tuple[fx.Node, fx.Node]]:
    """Layers, and the stored weights they have in common with something that is none of its kind."""
    names = read_in_other_roles(captured)
    return [(node, weight) for node, weight in weights_of_layers(captured) if captured.tensors[weight.name] in names]


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
    return bool(sources) and all(source in constant for source in sources) and not _is_random(node)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


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
