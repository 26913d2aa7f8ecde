"""A run of a segment, recorded as it happens, to be followed in any direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from recoup.operators.differential import Differential, RecordedCall, in_forward_mode, slope
from recoup.operators.record import operator_of


class Tape:
    """A run of a segment, recorded as it happens, to be followed in any direction in which `tensors` can move."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self._tensors, self._moving = frozenset(tensors), set[str]()
        self._steps: list[tuple[fx.Node, Differential]] = []

    def __call__(self, node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation."""
        operands = (*node.args, *node.kwargs.values())
        moves = tuple(any(self._moves(leaf) for leaf in tree_flatten(operand)[0]) for operand in operands)
        if not any(moves) or not any(_can_move(leaf) for leaf in tree_flatten(result)[0]):
            return
        self._moving.add(node.name)
        values, result = fx.node.map_aggregate(((*args, *kwargs.values()), result), _detached)
        call = RecordedCall(node.target, values, tuple(kwargs), result, moves)  # type: ignore[arg-type]  # a call_function's target
        self._steps.append((node, _differential(call)))

    def push(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The moves of values, by node, when stored `tensors` move; one that stays is not there."""
        values: dict[str, Any] = {}

        def look(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return None
            return tensors.get(str(leaf.target)) if leaf.op == "get_attr" else values.get(leaf.name)

        for node, push in self._steps:
            values[node.name] = push(fx.node.map_aggregate((*node.args, *node.kwargs.values()), look))
        return values

    def _moves(self, leaf: Any) -> bool:
        if not isinstance(leaf, fx.Node):
            return False
        return str(leaf.target) in self._tensors if leaf.op == "get_attr" else leaf.name in self._moving


def _differential(call: RecordedCall) -> Differential:
    """Of an operation, where it was run."""
    return (operator_of(call.target).differential or slope)(call) or in_forward_mode(call)


def _can_move(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
