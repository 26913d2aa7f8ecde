"""How the result of an operation moves when its operands do, once the operation has been run.

Forward mode runs every operation again for each direction. Here it has been run, and only what its differential needs
is kept: a layer is applied to the move of its input and to that of its weight, a batch norm is a factor per channel, an
activation a slope per value. Whatever has no such form goes through forward mode by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

# From the moves of all operands, each in its place and None for one that stays, to the move of the result.
Differential: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """An operation as it was run: its operands in order, the last ones by name, its result, and who `moves`."""

    target: Callable[..., Any]
    operands: tuple[Any, ...]
    names: tuple[str, ...]
    result: Any
    moves: tuple[bool, ...]

    @property
    def repeat(self) -> Callable[[Sequence[Any]], Any]:
        """The operation on other operands."""
        target, names = self.target, self.names  # and not this call, which holds on to its operands

        def run(operands: Sequence[Any]) -> Any:
            named = len(operands) - len(names)
            return target(*operands[:named], **dict(zip(names, operands[named:], strict=True)))

        return run


# The differential of a call, or None where this form of it has none.
Derive: TypeAlias = Callable[[RecordedCall], Differential | None]


def in_forward_mode(call: RecordedCall) -> Differential:
    """By torch's forward mode, which runs the operation once more for every direction."""
    # Forward mode takes some operations apart into views, which go by the plain order in memory.
    leaves, form = tree_flatten(tree_map_only(Tensor, Tensor.contiguous, call.operands))
    repeat = call.repeat

    def push(moves: Sequence[Any]) -> Any:
        found = [(place, move.contiguous()) for place, move in enumerate(tree_flatten(moves)[0]) if move is not None]

        def run(*values: Tensor) -> Any:
            filled = list(leaves)
            for (place, _), value in zip(found, values, strict=True):
                filled[place] = value
            return repeat(tree_unflatten(filled, form))

        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward mode
            return jvp(run, tuple(leaves[place] for place, _ in found), tuple(move for _, move in found))[1]

    return push


def slope(call: RecordedCall) -> Differential | None:
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
        (slopes,) = torch.autograd.grad(result.sum(), value)
    slopes = slopes.to(call.result.dtype)
    return lambda moves: moves[place] * slopes


def product(call: RecordedCall) -> Differential | None:
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


def linear_in_first(call: RecordedCall) -> Differential | None:
    """What is linear in its first operand."""
    if any(call.moves[1:]):
        return None
    repeat, others = call.repeat, call.operands[1:]
    return lambda moves: repeat((moves[0], *others))


def reshaped(call: RecordedCall) -> Differential | None:
    """The same values in another shape; the move need not lie in memory as the value does."""
    if call.result.dtype != call.operands[0].dtype:
        return None
    shape = call.result.shape
    return lambda moves: moves[0].reshape(shape)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
