"""What rules of operators, refits and costs know, for what is written in another form; the computation is the same.

A product with a stored tensor, from the left or as an einsum, becomes a linear layer. A mean over channels becomes
their sum over a number, which stays when channels go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from recoup.graph.capture import Captured
from recoup.graph.copies import copied
from recoup.graph.places import Place
from recoup.operators.equations import words_of
from recoup.operators.names import argument, operation_name

aten = torch.ops.aten


def with_layers(captured: Captured, by_hand: Collection[str]) -> tuple[Captured, frozenset[str]]:
    """`captured` with layers and sums in the place of the nodes in `by_hand`, and the names of these."""
    graph, _ = copied(captured.graph)
    constant: set[fx.Node] = set()
    found = set()
    for node in list(graph.nodes):
        sources = node.all_input_nodes
        if node.name in captured.tensors or (node.op == "call_function" and sources and constant.issuperset(sources)):
            constant.add(node)
        elif node.name in by_hand and (rewrite := _REWRITES.get(operation_name(node.target))):
            product = rewrite(Place(node), constant)
            found |= {product.name} if product is not None else set()
    return replace(captured, graph=graph), frozenset(found)


def may_have_layers(captured: Captured) -> bool:
    """Whether a product by hand with a stored tensor is in the graph, or a mean that may be over channels."""
    known = [node for node in captured.graph.nodes if operation_name(node.target) in _REWRITES]
    return any(
        _dim_of_mean(node) is not None or any(source.name in captured.tensors for source in node.all_input_nodes)
        for node in known
    )


def _matmul(place: Place, constant: set[fx.Node]) -> fx.Node | None:
    """W @ x is a linear layer on the rows of x, turned."""
    weight, value = place.node.args[:2]
    if weight not in constant or not isinstance(value, fx.Node) or [_rank(weight), min(_rank(value), 2)] != [2, 2]:
        return None
    product = place.add(aten.linear.default, place.add(aten.transpose.int, value, -2, -1), weight)
    place.give(place.add(aten.transpose.int, product, -2, -1))
    return product


def _einsum(place: Place, constant: set[fx.Node]) -> fx.Node | None:
    """What sums over letters that a stored tensor shares with the other operand alone."""
    equation, operands = str(place.node.args[0]), cast(list[fx.Node], place.node.args[1])
    if len(operands) != 2 or sum(o in constant for o in operands) != 1:
        return None
    words = words_of(equation, [_rank(operand) for operand in operands])
    if words is None:
        return None
    reads, result = words
    at = next(number for number, operand in enumerate(operands) if operand in constant)
    value, weight, letters, own = operands[1 - at], operands[at], list(reads[1 - at]), list(reads[at])
    summed = [letter for letter in letters if letter not in result]
    made = [letter for letter in own if letter not in letters]
    if set(summed) | set(made) != set(own) or not summed or not made or set(result) - set(letters) != set(made):
        return None
    rest = [letter for letter in letters if letter in result]
    rows = _joined(place, _permuted(place, value, letters, [*rest, *summed]), len(rest))
    sizes = [int(weight.meta["val"].shape[own.index(letter)]) for letter in made]
    if own == [*summed, *made] and len(own) == 2:
        product = place.add(aten.matmul.default, rows, weight)
    else:
        matrix = _joined(place, _permuted(place, weight, own, [*made, *summed]), len(made))
        matrix = place.add(aten.flatten.using_ints, matrix, 0, len(made) - 1) if len(made) > 1 else matrix
        product = place.add(aten.linear.default, rows, matrix)
    wide = place.add(aten.unflatten.int, product, len(rest), sizes) if len(made) > 1 else product
    place.give(_permuted(place, wide, [*rest, *made], list(result)))
    return product


def _mean(place: Place, _: set[fx.Node]) -> fx.Node | None:
    """A mean over one dim is the sum over it, divided by its size."""
    dim, value = _dim_of_mean(place.node), place.node.args[0]
    if dim is None or not isinstance(value, fx.Node):
        return None
    total = place.add(aten.sum.dim_IntList, value, [dim], bool(argument(place.node, 2, "keepdim")))
    place.give(place.add(aten.mul.Tensor, total, 1.0 / int(value.meta["val"].shape[dim])))
    return total


def _dim_of_mean(node: fx.Node) -> int | None:
    """The one dim that a mean is taken over; None for several, or for what is no mean."""
    dims = argument(node, 1, "dim") if operation_name(node.target) == "mean" and not node.kwargs.get("dtype") else None
    return dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 and isinstance(dims[0], int) else None


def _permuted(place: Place, value: Any, letters: list[str], wanted: list[str]) -> fx.Node:
    order = [letters.index(letter) for letter in wanted]
    return value if order == sorted(order) else place.add(aten.permute.default, value, order)


def _joined(place: Place, value: fx.Node, start: int) -> fx.Node:
    """All dims from `start` on as one."""
    return value if _rank(value) == start + 1 else place.add(aten.flatten.using_ints, value, start, -1)


def _rank(value: Any) -> int:
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return held.dim() if isinstance(held, Tensor) else -1


_REWRITES: dict[str, Callable[[Place, set[fx.Node]], fx.Node | None]] = {
    "matmul": _matmul,
    "mm": _matmul,
    "einsum": _einsum,
    "mean": _mean,
}
