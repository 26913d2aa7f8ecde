"""Carriers: operations that hand single elements on, wherever they put them.

Behind a carrier an element is still the one it was, or a function of it alone. A chain of them may therefore pass
through shapes of which no rectangle remains (a channel shuffle does), as long as it ends in one.
"""

from __future__ import annotations

from torch import fx

from recoup.structure.operations import operation_name
from recoup.structure.rules.movement import INDEXED, MOVES, RESHAPES
from recoup.structure.rules.table import is_pointwise

_MOVING = frozenset((*MOVES, *RESHAPES, "getitem", "expand", "cat", "concat", "stack", *INDEXED))


def is_movement(node: fx.Node) -> bool:
    """Whether the operation only puts elements elsewhere."""
    return node.op == "call_function" and operation_name(node.target) in _MOVING


def is_carrier(node: fx.Node) -> bool:
    """Whether the operation moves elements or acts on each of one tensor by itself."""
    if node.op != "call_function":
        return False
    name = operation_name(node.target)
    return name in _MOVING or (is_pointwise(node.target, name) and len(node.all_input_nodes) == 1)
