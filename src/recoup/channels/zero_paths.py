"""What a sum over channels reads: something that is zero where its layers are, or something else.

The masked original puts those rows of layers to zero that make channels that go. Where all operations up to the sum
keep zero at zero, what is gone adds nothing, and the sum of what is left is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from recoup.channels.norm_paths import is_number, passes_on, site_of
from recoup.graph.capture import Captured
from recoup.graph.runner import call
from recoup.labels.constraints import Constraints
from recoup.operators.names import argument, operation_name
from recoup.operators.record import Operator, operator_of

# The tensors that make a value zero, and the values that have to be zero for it.
_Step: TypeAlias = tuple[set[str], list[fx.Node]]
# Zero for each channel that is zero, over whatever dims of its own.
_NORMS = ("linalg_vector_norm", "norm")
# They put a number beside what there is, which stands in this place.
_PADS = {"constant_pad_nd": 2, "pad": 3}
# Zero where their gains and biases are: the places of these.
_AFFINE = {"batch_norm": (1, 2), "_native_batch_norm_legit_no_training": (1, 2), "instance_norm": (1, 2)}


def hold_sums(constraints: Constraints, captured: Captured) -> None:
    """Find what makes each sum's channels zero, and lock them where nothing does."""
    if not constraints.sums:
        return
    nodes, root = {node.name: node for node in captured.graph.nodes}, constraints.components()
    search = _ZeroSearch(captured.tensors, {total.node for total in constraints.sums})
    for place, total in enumerate(constraints.sums):
        found, wanted = search.zero(nodes[total.node].all_input_nodes[0]), root[total.channels].unique()
        stays = [
            name
            for name in sorted(found.sources)
            if not bool(torch.isin(wanted, _made_by(name, constraints, root)).any())
        ]
        obstacle = f"{stays[0]} is not cut with it" if stays else found.obstacle
        if obstacle is not None:
            constraints.lock(total.channels, f"{total.site} sums over channels: {obstacle}")
        constraints.sums[place] = replace(total, sources=found.sources)


def _made_by(tensor: str, constraints: Constraints, root: Tensor) -> Tensor:
    """The channels that indices of a tensor belong to, by their roots."""
    sides = [labels for (name, _), labels in constraints.sites.items() if name == tensor]
    parts = [part.inputs if part.transposed else part.outputs for part in constraints.grouped if part.weight == tensor]
    named = torch.cat([labels.flatten() for labels in (*sides, *parts)] or [torch.zeros(0, dtype=torch.long)])
    return root[named[named >= 0]]


@dataclass(frozen=True, slots=True)
class _Zero:
    """The tensors that a value is zero with, or what stands in the way of that."""

    sources: frozenset[str] = frozenset()
    obstacle: str | None = None


class _ZeroSearch:
    """From a value back to the tensors that make its channels zero."""

    def __init__(self, tensors: Mapping[str, str], sums: set[str]) -> None:
        self._tensors, self._sums = tensors, sums
        self._known: dict[fx.Node, _Zero] = {}

    def zero(self, value: fx.Node) -> _Zero:
        """What a value is zero with."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: fx.Node) -> _Zero:
        sources: set[str] = set()
        waiting, seen = [value], {value}
        while waiting:
            node = waiting.pop()
            step = self._step(node)
            if step is None:
                return _Zero(obstacle=f"{site_of(node)} comes before it")
            made, behind = step
            sources |= made
            waiting += [source for source in behind if source not in seen]
            seen.update(behind)
        return _Zero(frozenset(sources))

    def _step(self, node: fx.Node) -> _Step | None:
        """What makes a value zero, and what has to be zero for it; None where it may be something else."""
        if node.op == "placeholder" and node.name in self._tensors:
            return {self._tensors[node.name]}, []
        if node.op != "call_function" or node.name in self._sums:
            return None
        record, name = operator_of(node.target), operation_name(node.target)
        if record.layer is not None:
            return self._stored(record.layer.argument(node, part) for part in ("weight", "bias"))
        if name in _AFFINE:
            given = [node.args[place] if len(node.args) > place else None for place in _AFFINE[name]]
            return None if None in given else self._stored(given)
        if name in _OF_TWO:
            return _OF_TWO[name](self, node)
        behind = [source for source in node.all_input_nodes if _is_floating(source)]
        return (set(), behind) if _keeps_zero(node, record, name, behind) else None

    def _stored(self, given: Iterable[Any]) -> _Step | None:
        """These parameters, if nothing has computed them."""
        names = [self._tensors.get(part.name) for part in given if isinstance(part, fx.Node)]
        return ({name for name in names if name is not None}, []) if None not in names else None

    def _of_product(self, node: fx.Node) -> _Step | None:
        """A product is zero where one of its factors is."""
        factors = [part for part in node.args[:2] if isinstance(part, fx.Node) and part.name not in self._tensors]
        found = (self.zero(factor) for factor in factors if not is_number(factor))
        first = next((zero for zero in found if zero.obstacle is None), None)
        return None if first is None else (set(first.sources), [])

    def _of_quotient(self, node: fx.Node) -> _Step | None:
        """A quotient is where what is divided is, and what it is divided by is not."""
        above, below = node.args[:2]
        is_defined = not isinstance(below, fx.Node) or is_number(below) or self.zero(below).obstacle is not None
        return (set(), [above]) if isinstance(above, fx.Node) and is_defined else None


_OF_TWO: dict[str, Callable[[_ZeroSearch, fx.Node], _Step | None]] = {
    "mul": _ZeroSearch._of_product,
    "div": _ZeroSearch._of_quotient,
}


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _keeps_zero(node: fx.Node, record: Operator, name: str, behind: list[fx.Node]) -> bool:
    """Whether a value is zero where those behind it are."""
    if record.is_addition:
        return all(isinstance(value, fx.Node) and not is_number(value) for value in node.args[:2])
    if name in _PADS:
        return not argument(node, _PADS[name], "value")
    if record.is_movement or record.is_pooling or name in _NORMS or passes_on(node, record):
        return True
    return record.is_pointwise and node.all_input_nodes == behind and len(behind) == 1 and _gives_zero(node)


def _gives_zero(node: fx.Node) -> bool:
    """Whether an operation on each element of one tensor gives zero for zero."""
    try:
        result = call(node, lambda _: torch.zeros(1))
    except (RuntimeError, TypeError):
        return False
    return isinstance(result, Tensor) and not bool(result.any())
