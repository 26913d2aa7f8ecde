"""Regions of code that torch.export keeps as graphs of their own, written into the graph around them.

A region that switches gradients on or off computes the same either way. We capture with autocast off, so a region that
switches it off changes nothing. One that switches it on chooses dtypes as it runs: it stays one operation, of which
nothing is known but the graph that it runs.
"""

from __future__ import annotations

from typing import Any

from torch import fx

# Names of the operations that run a region, and where the region stands among their arguments, before its operands.
_GRADIENTS, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_PLACE = {_GRADIENTS: 1, _AUTOCAST: 4}
_REGION = "region"


def open_regions(module: fx.GraphModule) -> None:
    """Put the operations of plain regions in the place of their calls; any other call knows its graph (`call_of`)."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and str(node.target) in _PLACE:
            place = _PLACE[str(node.target)]
            region = module.get_submodule(str(node.args[place].target))
            assert isinstance(region, fx.GraphModule)
            open_regions(region)
            if _is_plain(node):
                _write_out(module.graph, node, region.graph, node.args[place + 1 :])
            else:
                node.meta[_REGION] = region
    unused = [node for node in module.graph.nodes if node.op == "get_attr" and not node.users]
    for node in unused:
        module.graph.erase_node(node)


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """What a call runs, and on what: an operation and its arguments, or the graph of a region and its operands."""
    region = node.meta.get(_REGION)
    return (node.target, node.args) if region is None else (region, node.args[_PLACE[str(node.target)] + 1 :])


def _is_plain(node: fx.Node) -> bool:
    return str(node.target) == _GRADIENTS or node.args[2] is False


def _write_out(graph: fx.Graph, call: fx.Node, region: fx.Graph, operands: tuple[Any, ...]) -> None:
    inputs = [node for node in region.nodes if node.op == "placeholder"]
    with graph.inserting_before(call):
        results: Any = graph.graph_copy(region, dict(zip(inputs, operands, strict=True)))
    for user in list(call.users):  # results are taken out of a tuple one by one
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
