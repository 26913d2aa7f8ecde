"""One operation of the graph with labels in the place of tensors: what a label rule gets, and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recoup.labels.arrays import FIXED, NONE, constant
from recoup.labels.constraints import Constraints, TensorRef

Value: TypeAlias = Any  # labels, a TensorRef, a list of them, or a plain argument of the operation


@dataclass(frozen=True, slots=True, eq=False)
class LabelCall:
    """One operation of the graph, with labels in the place of tensors."""

    target: Any
    name: str
    where: str
    node: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    shape: Any  # of the result: a size, or a list of sizes when the operation returns several tensors
    follows: bool = False  # whether its numbers are sizes that a module of torch's own remembers, and that follow

    @property
    def site(self) -> str:
        """For messages: the operation and the module it happens in."""
        return f"{self.name} in {self.where or 'forward'}"

    def argument(self, position: int, name: str, default: Value = None) -> Value:
        """An argument by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def operands(self, constraints: Constraints) -> list[Tensor]:
        """Labels of every tensor among the arguments, one level of lists included."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            items = value if isinstance(value, (list, tuple)) else [value]
            found += [constraints.labels_of(item) for item in items if isinstance(item, (Tensor, TensorRef))]
        return found


def lock_operands(call: LabelCall, constraints: Constraints, reason: str) -> Value:
    """Lock every operand; the result has the size it has."""
    for labels in call.operands(constraints):
        constraints.lock(labels, reason)
    return unlabelled(call.shape, FIXED)


def unlabelled(shape: Any, value: int = NONE) -> Value:
    """A result that carries no channel: one tensor of labels, or a list of them."""
    if isinstance(shape, torch.Size):
        return constant(shape, value)
    return [unlabelled(part, value) for part in shape] if isinstance(shape, (list, tuple)) else None


def spread_over(labels: Tensor, shape: Any) -> Value:
    """Labels expanded to the size of a result, or of each of several."""
    if isinstance(shape, torch.Size):
        return labels.expand(shape)
    return [spread_over(labels, part) for part in shape] if isinstance(shape, (list, tuple)) else None
