"""A value that is written where a mask says so is a choice between two values."""

from __future__ import annotations

import torch
from torch import fx

from recoup.graph.places import Place
from recoup.operators.names import argument, operation_name

aten = torch.ops.aten


def choose_by_masks(graph: fx.Graph) -> None:
    """Turn writes by masks, in the graph itself, into choices between two values."""
    for node in list(graph.nodes):
        if node.op == "call_function" and operation_name(node.target) == "index_put":
            _masked_write(Place(node))


def _masked_write(place: Place) -> None:
    """A single value put in where a mask says so."""
    whole, index, value = place.node.args[:3]
    mask = index[0] if isinstance(index, (list, tuple)) and len(index) == 1 else None
    if not all(isinstance(node, fx.Node) for node in (whole, mask, value)) or argument(place.node, 3, "accumulate"):
        return
    kinds = [node.meta["val"] for node in (whole, mask, value)]  # type: ignore[union-attr]  # nodes
    if kinds[1].dtype != torch.bool or kinds[2].dim() or kinds[2].dtype != kinds[0].dtype:
        return
    for _ in range(kinds[0].dim() - kinds[1].dim()):
        mask = place.add(aten.unsqueeze.default, mask, -1)
    place.give(place.add(aten.where.self, mask, value, whole))
