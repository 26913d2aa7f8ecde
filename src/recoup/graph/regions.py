"""Regions that export sets apart as graphs of their own: code under a `with torch.autocast(...)`.

We capture with autocast off. So a region that switches it off changes nothing, and is written out; one that switches it
on is one operation, which nothing is known of but the graph that it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

_REGION = "region"
# Before its operands the call of a region has the kind of device, the data type, two flags and the graph.
_OPERANDS = 5


def open_regions(program: torch.export.ExportedProgram) -> None:
    """Write out, in place, the regions that switch autocast off; any other call knows its graph (`call_of`)."""
    _open(program.graph, program.graph_module)


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """What a call runs, and on what: an operation and its arguments, or the graph of a region and its operands."""
    region = node.meta.get(_REGION)
    return (node.target, node.args) if region is None else (region, node.args[_OPERANDS:])


def _open(graph: fx.Graph, owner: nn.Module) -> None:
    """Regions within a region are opened first."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.higher_order.wrap_with_autocast:
            _, _, is_on, _, place = node.args[:_OPERANDS]
            region = getattr(owner, str(place.target))
            _open(region.graph, region)
            if is_on:
                node.meta[_REGION] = region
            else:
                _write_out(graph, node, region.graph)
                graph.erase_node(place)


def _write_out(graph: fx.Graph, node: fx.Node, region: fx.Graph) -> None:
    """The operations of `region` in the place of `node`, of whose results every use takes one by its number."""
    inner = dict(zip((n for n in region.nodes if n.op == "placeholder"), node.args[_OPERANDS:], strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(region, inner)  # a tuple, as every region returns
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
