"""Pairings: products of two activations, summed over a dim they share, as in attention.

Letters name dims, as in an einsum. Along a letter that both operands have, their channels are the same ones. A letter
that is summed over mixes its channels; one that only one operand has passes its channels on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from recoup.labels.arrays import FIXED, NONE, compress, constant, core, replaced, varies, varying_dims
from recoup.labels.constraints import Constraints, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import product
from recoup.operators.equations import words_of
from recoup.operators.pointwise import meet
from recoup.operators.products import dense, read_plainly
from recoup.operators.record import LayerCall, Letters, operator

Paired = list[tuple[fx.Node, Letters]]


def matmul(call: LabelCall, constraints: Constraints) -> Value:
    """By a stored matrix it is a linear layer without a bias; otherwise a pairing."""
    left, right = call.args[:2]
    if isinstance(right, TensorRef) and len(right.shape) == 2 and not isinstance(left, TensorRef):
        return dense(call, constraints, right, None, dim=len(call.shape) - 1, input_dim=0)
    first, second = constraints.labels_of(left), constraints.labels_of(right)
    if isinstance(left, TensorRef) and len(left.shape) == 2 and set(varying_dims(second)) == {second.dim() - 2}:
        return _by_hand(call, constraints, [second.dim() - 2], first)
    return _matmul(first, second, call, constraints)


def _letters_of_matmul(node: fx.Node) -> list[Paired]:
    """Rows by columns; what lies before them meets from the right."""
    left, right = _nodes(node.args[:2])
    return [[(left, _lettered(left, "ik")), (right, _lettered(right, "kj"))]]


def _nodes(operands: Any) -> list[fx.Node]:
    """The operands of a call, all of which are made by other calls or given to the model."""
    assert all(isinstance(operand, fx.Node) for operand in operands)
    return list(operands)


def _lettered(operand: fx.Node, last: str) -> Letters:
    """The last two letters and, before them, places counted from the end; a vector has the letter that is summed."""
    rank = operand.meta["val"].dim()
    return "k" if rank == 1 else [*range(rank - 2, 0, -1), *last]


_LAYER = LayerCall(("input", "weight"), read_plainly)
operator(
    "matmul", "mm", "__matmul__", differential=product, layer=_LAYER, pair=_letters_of_matmul, weights=(1,)
)(matmul)  # fmt: skip
operator("bmm", differential=product, pair=_letters_of_matmul)(matmul)


def _letters_of_attention(node: fx.Node) -> list[Paired]:
    """Queries by keys, then scores by values; scores have the rows of the queries."""
    query, key, value = _nodes(node.args[:3])
    scores = [(query, _lettered(query, "id")), (key, _lettered(key, "jd"))]
    return [scores, [(query, [*_lettered(query, "id")[:-1], None]), (value, _lettered(value, "je"))]]


@operator("scaled_dot_product_attention", pair=_letters_of_attention)
def attention(call: LabelCall, constraints: Constraints) -> Value:
    """Heads go as a whole; the values of a single head go one by one."""
    query, key, value = (constraints.labels_of(operand) for operand in call.args[:3])
    if call.argument(7, "enable_gqa", False):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (operand.repeat_interleave(repeats, dim=-3) for operand in (key, value))
    scores = _matmul(query, key.transpose(-1, -2), call, constraints)
    mask = call.argument(3, "attn_mask")
    if mask is not None:
        scores = compress(meet([scores, constraints.labels_of(mask)], scores.shape, call, constraints))
    return _matmul(scores, value, call, constraints)


def _letters_of_einsum(node: fx.Node) -> list[Paired] | None:
    """Those of the equation."""
    operands = _nodes(node.args[1])
    words = words_of(str(node.args[0]), [operand.meta["val"].dim() for operand in operands])
    return None if words is None else [list(zip(operands, words[0], strict=True))]


@operator("einsum", pair=_letters_of_einsum)
def einsum(call: LabelCall, constraints: Constraints) -> Value:
    """Of two activations; the equation names its letters."""
    equation, operands = call.args[:2]
    words = words_of(equation, [len(operand.shape) for operand in operands])
    if words is None:
        return lock_operands(call, constraints, f"{call.site} ({equation}) is not understood")
    letters, result = words
    projected = _projected(operands, letters, result, constraints)
    if projected is not None:
        return _by_hand(call, constraints, *projected)
    left, right = (_Operand(constraints.labels_of(x), word) for x, word in zip(operands, letters, strict=True))
    return pair(left, right, result, call, constraints)


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    """Labels, and the letter of each of their dims."""

    labels: Tensor
    letters: Letters

    def dims(self, letters: set[object]) -> list[int]:
        return [dim for dim, letter in enumerate(self.letters) if letter in letters]

    def changing(self) -> set[object]:
        return {letter for dim, letter in enumerate(self.letters) if varies(self.labels, dim)}

    def over(self, letters: Letters, sizes: dict[object, int]) -> Tensor:
        """The labels laid out over all `letters`."""
        order = [letter for letter in letters if letter in self.letters]
        moved = self.labels.permute([self.letters.index(letter) for letter in order])
        for dim, letter in enumerate(letters):
            if letter not in self.letters:
                moved = moved.unsqueeze(dim)
        return moved.expand([sizes[letter] for letter in letters])


def pair(left: _Operand, right: _Operand, result: Letters, call: LabelCall, constraints: Constraints) -> Tensor:
    """Labels of the sum of products over the letters that are not in `result`."""
    shared = set(left.letters) & set(right.letters)
    summed = (set(left.letters) | set(right.letters)) - set(result)
    left, right = _with_parameters(left, right, shared & summed, call, constraints)
    right, left = _with_parameters(right, left, shared & summed, call, constraints)
    if left.changing() - shared and right.changing() - shared:  # an outer product: neither side's channels stand alone
        left, right = (_mixed(side, set(side.letters) - shared, call, constraints) for side in (left, right))
    sizes = {x: n for side in (left, right) for x, n in zip(side.letters, side.labels.shape, strict=True)}
    order = [*result, *(letter for letter in sizes if letter not in result)]
    together = _coupled(left, right, shared, order, sizes, call, constraints)
    mixed = _mixed(_Operand(compress(together), order), summed, call, constraints)
    return _first(mixed.labels, len(order) - len(result))


def _projected(
    operands: list[Value], letters: list[str], result: str, constraints: Constraints
) -> tuple[list[int], Tensor] | None:
    """Where an einsum puts what a parameter makes of all channels of the other operand; None if it is no such one."""
    at = next((place for place, operand in enumerate(operands) if isinstance(operand, TensorRef)), None)
    if at is None or isinstance(operands[1 - at], TensorRef):
        return None
    labels, read, own = constraints.labels_of(operands[1 - at]), letters[1 - at], letters[at]
    summed, made = set(read) - set(result), set(own) - set(read)
    changing = {read[dim] for dim in varying_dims(labels)}
    if not changing or not made or summed | made != set(own) or not changing <= summed:
        return None
    return [result.index(letter) for letter in own if letter in made], constraints.labels_of(operands[at])


def _by_hand(call: LabelCall, constraints: Constraints, dims: list[int], weight: Tensor) -> Value:
    """Channels along `dims`, made by a product that is to be a layer; the model's own class could not refit it."""
    if constraints.sizes_stay:
        constraints.lock(weight, f"{call.site} multiplies by it in no layer")
        return lock_operands(call, constraints, f"{call.site} multiplies by a parameter in no layer")
    constraints.by_hand.append(call.node)
    sizes = [call.shape[dim] if dim in dims else 1 for dim in range(len(call.shape))]
    return constraints.fresh(torch.Size(sizes).numel()).view(sizes).expand(call.shape)


def _with_parameters(
    side: _Operand, other: _Operand, summed: set[object], call: LabelCall, constraints: Constraints
) -> tuple[_Operand, _Operand]:
    """Both, where `other` consists of parameters alone: it reads all that it sums over, and is not the channels' own.

    It follows channels along letters that both have and that remain; for the rest it stays as it is.
    """
    if not other.changing() or constraints.are_made(other.labels) or not constraints.are_made(side.labels):
        return side, other
    side = _mixed(side, summed, call, constraints)
    return side, _mixed(other, set(other.letters) - side.changing(), call, constraints)


def _first(labels: Tensor, count: int) -> Tensor:
    """The labels at index 0 of the last `count` dims, along which they do not change."""
    for _ in range(count):
        labels = labels.select(-1, 0)
    return labels


def _coupled(
    left: _Operand,
    right: _Operand,
    shared: set[object],
    order: Letters,
    sizes: dict[object, int],
    call: LabelCall,
    constraints: Constraints,
) -> Tensor:
    """What both have along the letters they share is one channel; a side without channels there counts as fixed."""
    a, b = left.over(order, sizes), right.over(order, sizes)
    if not left.changing() & shared:
        b = replaced(b, FIXED, NONE)
    if not right.changing() & shared:
        a = replaced(a, FIXED, NONE)
    if not (left.changing() | right.changing()) & shared:
        small_a, small_b = core(a, b)
        return torch.where(small_a >= 0, small_a, small_b).expand(a.shape)
    return constraints.couple(a, b, f"{call.site} pairs it with a tensor of fixed size")


def _mixed(side: _Operand, letters: set[object], call: LabelCall, constraints: Constraints) -> _Operand:
    mixed = constraints.mix(side.labels, side.dims(letters), f"{call.site} mixes channels")
    return _Operand(constant(side.labels.shape, FIXED) if mixed is None else mixed, side.letters)


def _matmul(left: Tensor, right: Tensor, call: LabelCall, constraints: Constraints) -> Tensor:
    """Batch dims meet from the right; one of length 1 is stretched and shares nothing."""
    if left.dim() == 1 or right.dim() == 1:
        return _with_vectors(left, right, call, constraints)
    count = max(left.dim(), right.dim()) - 2
    left, right = (side[(None,) * (count + 2 - side.dim())] for side in (left, right))
    batch = list(range(count))
    alone = {dim for dim in batch if left.shape[dim] != right.shape[dim]}
    sides = [
        _Operand(side, [(name, d) if d in alone and side.shape[d] == 1 else d for d in batch] + list(last))
        for name, side, last in (("left", left, "ik"), ("right", right, "kj"))
    ]
    stretched = [letter for side in sides for letter in side.letters if isinstance(letter, tuple)]
    labels = pair(sides[0], sides[1], [*batch, "i", "j", *stretched], call, constraints)
    return _first(labels, len(stretched))


def _with_vectors(left: Tensor, right: Tensor, call: LabelCall, constraints: Constraints) -> Tensor:
    rows = left[None] if left.dim() == 1 else left
    columns = right[:, None] if right.dim() == 1 else right
    labels = _matmul(rows, columns, call, constraints)
    labels = labels.squeeze(-1) if right.dim() == 1 else labels
    return labels.squeeze(-1 if right.dim() == 1 else -2) if left.dim() == 1 else labels
