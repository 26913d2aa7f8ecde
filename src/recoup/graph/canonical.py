"""A linear layer for what is written in another form: a product with a stored tensor, a sum or a mean over channels.

Rules of operators, refits and costs then know it. The computation is the same. A product may stand on the left, or be
an einsum; a sum is a layer with one output, whose weights are all the same and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from recoup.graph.capture import Captured
from recoup.graph.copies import copied
from recoup.graph.folding import FOLDED
from recoup.graph.places import Place
from recoup.operators.equations import words_of
from recoup.operators.names import argument, operation_name

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class WithLayers:
    """A captured graph with layers that were none; the names of their nodes, and of the weights that are new."""

    captured: Captured
    nodes: frozenset[str] = frozenset()
    weights: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Work:
    """A graph being rewritten: whether it learns, which nodes depend on parameters alone, and the new tensors."""

    graph: fx.Graph
    learns: bool
    constant: set[fx.Node] = field(default_factory=set)
    new: dict[fx.Node, tuple[str, Tensor]] = field(default_factory=dict)

    def store(self, name: str, like: Tensor, row: list[float]) -> fx.Node:
        """A weight of one output."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            place = self.graph.placeholder(name.replace(".", "_"))
        value = torch.tensor([row], dtype=like.dtype, device=like.device)
        place.meta["val"] = like.new_empty(value.shape)
        self.new[place] = name, nn.Parameter(value, requires_grad=self.learns)
        self.constant.add(place)
        return place


def with_layers(captured: Captured, by_hand: Collection[str]) -> WithLayers:
    """`captured` with linear layers in the place of the nodes in `by_hand`."""
    graph, _ = copied(captured.graph)
    work = _Work(graph, any(value.requires_grad for value in captured.values.values()))
    found = set()
    for node in list(graph.nodes):
        sources = node.all_input_nodes
        if node.name in captured.tensors or (
            node.op == "call_function" and sources and work.constant.issuperset(sources)
        ):
            work.constant.add(node)
        elif node.name in by_hand and (rewrite := _REWRITES.get(operation_name(node.target))):
            product = rewrite(Place(node), work)
            found |= {product.name} if product is not None else set()
    tensors = {**captured.tensors, **{place.name: name for place, (name, _) in work.new.items()}}
    values = {**captured.values, **{place.name: value for place, (_, value) in work.new.items()}}
    made = replace(captured, graph=graph, tensors=tensors, values=values)
    return WithLayers(made, frozenset(found), tuple(name for name, _ in work.new.values()))


def with_sums(graph: fx.Graph, weights: Collection[str]) -> fx.Graph:
    """The graph of a plan itself, with layers of these weights as weighted sums again.

    As a product of matrices each would cost what the model does not.
    """
    for node in list(graph.nodes):
        if node.target is aten.linear.default and node.args[1].target in weights:
            rows, weight, *bias = node.args
            with graph.inserting_before(node):
                total = graph.call_function(aten.mul.Tensor, (rows, weight))
                total = graph.call_function(aten.sum.dim_IntList, (total, [-1], True))
                for shift in filter(None, bias):
                    total = graph.call_function(aten.add.Tensor, (total, shift))
            node.replace_all_uses_with(total)
            graph.erase_node(node)
    return graph


def may_have_layers(captured: Captured) -> bool:
    """Whether a product by hand with a stored tensor is in the graph, or a sum that may be over channels."""
    known = [node for node in captured.graph.nodes if operation_name(node.target) in _REWRITES]
    return any(
        _summed_dim(node) is not None or any(source.name in captured.tensors for source in node.all_input_nodes)
        for node in known
    )


def _sum(place: Place, work: _Work) -> fx.Node | None:
    """A sum or a mean over one dim is a linear layer along it, with one output."""
    dim, value = _summed_dim(place.node), place.node.args[0]
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    if dim is None or not isinstance(held, Tensor) or not held.is_floating_point():
        return None
    last, size = dim % held.dim() == held.dim() - 1, int(held.shape[dim])
    share = 1 / size if operation_name(place.node.target) == "mean" else 1.0
    weight = work.store(f"{FOLDED}{place.node.name}", held, [share] * size)
    rows = value if last else place.add(aten.transpose.int, value, dim, -1)
    product = place.add(aten.linear.default, rows, weight)
    whole = product if last else place.add(aten.transpose.int, product, dim, -1)
    place.give(whole if argument(place.node, 2, "keepdim") else place.add(aten.squeeze.dim, whole, dim))
    return product


def _summed_dim(node: fx.Node) -> int | None:
    """The one dim that a sum or a mean is taken over; None for several, or for anything else."""
    is_sum = operation_name(node.target) in ("sum", "mean") and not node.kwargs.get("dtype")
    dims = argument(node, 1, "dim") if is_sum else None
    return dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 and isinstance(dims[0], int) else None


def _matmul(place: Place, work: _Work) -> fx.Node | None:
    """W @ x is a linear layer on the rows of x, turned."""
    weight, value = place.node.args[:2]
    if weight not in work.constant or not isinstance(value, fx.Node) or [_rank(weight), min(_rank(value), 2)] != [2, 2]:
        return None
    product = place.add(aten.linear.default, place.add(aten.transpose.int, value, -2, -1), weight)
    place.give(place.add(aten.transpose.int, product, -2, -1))
    return product


def _einsum(place: Place, work: _Work) -> fx.Node | None:
    """What sums over letters that a stored tensor shares with the other operand alone."""
    equation, operands = str(place.node.args[0]), cast(list[fx.Node], place.node.args[1])
    if len(operands) != 2 or sum(o in work.constant for o in operands) != 1:
        return None
    words = words_of(equation, [_rank(operand) for operand in operands])
    if words is None:
        return None
    reads, result = words
    at = next(number for number, operand in enumerate(operands) if operand in work.constant)
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


def _permuted(place: Place, value: Any, letters: list[str], wanted: list[str]) -> fx.Node:
    order = [letters.index(letter) for letter in wanted]
    return value if order == sorted(order) else place.add(aten.permute.default, value, order)


def _joined(place: Place, value: fx.Node, start: int) -> fx.Node:
    """All dims from `start` on as one."""
    return value if _rank(value) == start + 1 else place.add(aten.flatten.using_ints, value, start, -1)


def _rank(value: Any) -> int:
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return held.dim() if isinstance(held, Tensor) else -1


_REWRITES: dict[str, Callable[[Place, _Work], fx.Node | None]] = {
    "matmul": _matmul,
    "mm": _matmul,
    "einsum": _einsum,
    "sum": _sum,
    "mean": _sum,
}
