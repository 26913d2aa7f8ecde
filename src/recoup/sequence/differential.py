"""How what leaves an operation moves when what enters it does, once the operation has been run.

Forward mode runs every operation again for each direction. Here it has been run, and only what its differential needs
is kept: a layer is applied to the move of its input and to that of its weight, a batch norm is a factor per channel, an
activation a slope per value. What is not in the table goes through forward mode, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import jvp
from torch.utils._pytree import tree_flatten, tree_unflatten

from recoup.structure.operations import operation_name

# From the moves of all operands, each in its place and None for one that stays, to the move of the result.
Differential: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An operation as it was run: its operands in order, the last ones by name, its result, and who `moves`."""

    target: Callable[..., Any]
    operands: tuple[Any, ...]
    names: tuple[str, ...]
    result: Any
    moves: tuple[bool, ...]

    @property
    def name(self) -> str:
        """Of the operation."""
        return operation_name(self.target)

    @property
    def repeat(self) -> Callable[[Sequence[Any]], Any]:
        """The operation on other operands."""
        target, names = self.target, self.names  # and not this call, which holds on to its operands

        def run(operands: Sequence[Any]) -> Any:
            named = len(operands) - len(names)
            return target(*operands[:named], **dict(zip(names, operands[named:], strict=True)))

        return run


class Tape:
    """A run of a stretch, recorded as it happens, to be followed in any direction in which `tensors` can move."""

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
        call = Call(node.target, values, tuple(kwargs), result, moves)  # type: ignore[arg-type]  # a call_function's target
        self._steps.append((node, differential(call)))

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


def differential(call: Call) -> Differential:
    """Of an operation, where it was run."""
    return _RULES.get(call.name, _pointwise)(call) or _in_forward_mode(call)


def _in_forward_mode(call: Call) -> Differential:
    leaves, form = tree_flatten(call.operands)
    repeat = call.repeat

    def push(moves: Sequence[Any]) -> Any:
        found = [(place, move) for place, move in enumerate(tree_flatten(moves)[0]) if move is not None]

        def run(*values: Tensor) -> Any:
            filled = list(leaves)
            for (place, _), value in zip(found, values, strict=True):
                filled[place] = value
            return repeat(tree_unflatten(filled, form))

        return jvp(run, tuple(leaves[place] for place, _ in found), tuple(move for _, move in found))[1]

    return push


def _pointwise(call: Call) -> Differential | None:
    """A slope for every value, of an operation on one tensor that acts on each value by itself."""
    place, tags = call.moves.index(True), getattr(call.target, "tags", ())
    value = call.operands[place]
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or sum(call.moves) > 1:
        return None
    if not _is_real(value) or not _is_real(call.result) or value.shape != call.result.shape:
        return None
    with torch.enable_grad():
        value = value.detach().requires_grad_()
        result = call.repeat((*call.operands[:place], value, *call.operands[place + 1 :]))
        (slope,) = torch.autograd.grad(result.sum(), value)
    slope = slope.to(call.result.dtype)
    return lambda moves: moves[place] * slope


def _product(call: Call) -> Differential | None:
    """What multiplies its first two operands; the third, if there is one, is a bias."""
    moves_left, moves_right, moves_bias, *rest = (*call.moves, False)
    if call.names or any(rest) or (moves_bias and not moves_right):
        return None
    target, (left, right, *others) = call.target, call.operands
    left, right = left if moves_right else None, right if moves_left else None
    bias, others = others[:1], others[1:]

    def push(moves: Sequence[Any]) -> Any:
        terms = []
        if moves_left:
            terms.append(target(moves[0], right, *[None for _ in bias], *others))
        if moves_right:
            terms.append(target(left, *moves[1 : 2 + len(bias)], *others))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    return push


def _sum(call: Call) -> Differential | None:
    factor = dict(zip(call.names, call.operands[len(call.operands) - len(call.names) :], strict=True)).get("alpha", 1)
    shape, dtype = call.result.shape, call.result.dtype

    def push(moves: Sequence[Any]) -> Any:
        left, right = moves[:2]
        if left is None:
            return (factor * right).expand(shape).to(dtype)
        return (left.expand(shape) if right is None else torch.add(left, right, alpha=factor)).to(dtype)

    return push


def _linear(call: Call) -> Differential | None:
    """What is linear in its first operand."""
    if any(call.moves[1:]):
        return None
    repeat, others = call.repeat, call.operands[1:]
    return lambda moves: repeat((moves[0], *others))


def _reshaped(call: Call) -> Differential | None:
    """The same values in another shape; the move need not lie in memory as the value does."""
    if call.result.dtype != call.operands[0].dtype:
        return None
    shape = call.result.shape
    return lambda moves: moves[0].reshape(shape)


def _padded(call: Call) -> Differential | None:
    """With a constant around: it does not move."""
    target, (_, pad, *mode) = call.target, call.operands
    if call.names or mode[:1] not in ([], ["constant"]):
        return None
    return lambda moves: target(moves[0], pad)


def _dropped(call: Call) -> Differential | None:
    return None if call.operands[2] else lambda moves: moves[0]


def _item(call: Call) -> Differential:
    index = call.operands[1]
    return lambda moves: moves[0][index]


def _joined(call: Call) -> Differential | None:
    target, (values, *others), names = call.target, call.operands, call.names
    if names:
        return None
    nothing = [value.new_zeros(()).expand(value.shape) for value in values]

    def push(moves: Sequence[Any]) -> Any:
        return target([zero if move is None else move for zero, move in zip(nothing, moves[0], strict=True)], *others)

    return push


def _normed(call: Call) -> Differential | None:
    """A factor for every channel, of a batch norm that uses its statistics."""
    _, weight, _, mean, variance, is_training, _, eps, *_ = call.operands
    if any(call.moves[1:]) or is_training or mean is None or variance is None:
        return None
    factor = (variance.double() + eps).rsqrt() * (1.0 if weight is None else weight)
    factor = factor.to(call.result.dtype).reshape(-1, *[1] * (call.result.dim() - 2))
    return lambda moves: moves[0] * factor


_RULES: dict[str, Callable[[Call], Differential | None]] = {
    **dict.fromkeys([f"conv{n}d" for n in (1, 2, 3)], _product),
    **dict.fromkeys([f"conv_transpose{n}d" for n in (1, 2, 3)], _product),
    **dict.fromkeys(["linear", "matmul", "bmm", "mm", "mul"], _product),
    **dict.fromkeys([f"avg_pool{n}d" for n in (1, 2, 3)], _linear),
    **dict.fromkeys([f"adaptive_avg_pool{n}d" for n in (1, 2, 3)], _linear),
    **dict.fromkeys(["mean", "sum", "permute", "transpose", "slice", "select", "expand", "clone"], _linear),
    **dict.fromkeys(["view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"], _reshaped),
    "add": _sum,
    "pad": _padded,
    "dropout": _dropped,
    "getitem": _item,
    "cat": _joined,
    "batch_norm": _normed,
}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _can_move(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
