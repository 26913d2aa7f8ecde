"""Regions of code that torch.export keeps as graphs of their own, written into the graph around them.

A region that switches gradients on or off computes the same either way. One that switches autocast off does what the
graph around it does, which has none. One that switches autocast on chooses dtypes as it runs, and stays.
"""

from __future__ import annotations

from typing import Any

from torch import fx

# Names of the operations that run a region, and where the region stands among their arguments.
_GRADIENTS, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
_PLACE = {_GRADIENTS: 1, _AUTOCAST: 4}


def inline_regions(module: fx.GraphModule) -> None:
    """Put the operations of such regions in the place of their calls, in the module's own graph."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_plain_region(node):
            place = _PLACE[str(node.target)]
            region = module.get_submodule(str(node.args[place].target))
            assert isinstance(region, fx.GraphModule)
            inline_regions(region)
            _inline(module.graph, node, region.graph, node.args[place + 1 :])
    unused = [node for node in module.graph.nodes if node.op == "get_attr" and not node.users]
    for node in unused:
        module.graph.erase_node(node)


def _is_plain_region(node: fx.Node) -> bool:
    if str(node.target) == _GRADIENTS:
        return True
    return str(node.target) == _AUTOCAST and node.args[2] is False


def _inline(graph: fx.Graph, call: fx.Node, region: fx.Graph, args: tuple[Any, ...]) -> None:
    inputs = [node for node in region.nodes if node.op == "placeholder"]
    with graph.inserting_before(call):
        outputs: Any = graph.graph_copy(region, dict(zip(inputs, args, strict=True)))
    for user in list(call.users):  # results are taken out of a tuple one by one
        user.replace_all_uses_with(outputs[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
