"""Where the values of a graph come from."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from recoup.operators.names import writes


def ancestors(graph: fx.Graph) -> dict[fx.Node, int]:
    """For every node, the set of nodes it depends on, itself included, as the bits of an integer."""
    known: dict[fx.Node, int] = {}
    for number, node in enumerate(graph.nodes):
        known[node] = 1 << number
        for source in node.all_input_nodes:
            known[node] |= known[source]
    return known


def needed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the result depends on; attention averages its weights, for one, even if nobody reads them."""
    found: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output" or writes(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def makers(value: fx.Node, is_maker: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What a value consists of: the first nodes on every way back from it that are makers."""
    found: set[fx.Node] = set()
    waiting, seen = [value], {value}
    while waiting:
        node = waiting.pop()
        if is_maker(node):
            found.add(node)
            continue
        fresh = [source for source in node.all_input_nodes if source not in seen]
        waiting += fresh
        seen.update(fresh)
    return found
