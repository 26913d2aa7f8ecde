"""The table itself: rules by operation name, and the rule for what is not in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recoup.structure.labels import FIXED, NONE, constant
from recoup.structure.ledger import Ledger, TensorRef

Value: TypeAlias = Any  # labels, a TensorRef, a list of them, or a plain argument of the operation


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operation of the graph, with labels in the place of tensors."""

    target: Any
    name: str
    where: str
    node: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    shape: Any  # of the result: a size, or a list of sizes when the operation returns several tensors

    @property
    def site(self) -> str:
        """For messages: the operation and the module it happens in."""
        return f"{self.name} in {self.where or 'forward'}"

    def argument(self, position: int, name: str, default: Value = None) -> Value:
        """An argument by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def operands(self, ledger: Ledger) -> list[Tensor]:
        """Labels of every tensor among the arguments, one level of lists included."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            items = value if isinstance(value, (list, tuple)) else [value]
            found += [ledger.labels_of(item) for item in items if isinstance(item, (Tensor, TensorRef))]
        return found


Rule: TypeAlias = Callable[[Call, Ledger], Value]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function into the table under these operation names."""

    def enter(function: Rule) -> Rule:
        for name in names:
            assert name not in _RULES, name
            _RULES[name] = function
        return function

    return enter


def find_rule(target: Any, name: str) -> Rule:
    """The rule for an operation: by name, by its being pointwise, or the one that locks what it does not know."""
    if name in _RULES:
        return _RULES[name]
    return _RULES["pointwise"] if torch.Tag.pointwise in getattr(target, "tags", ()) else unknown


def is_pointwise(target: Any, name: str) -> bool:
    """Whether an operation acts on each element by itself."""
    return find_rule(target, name) is _RULES["pointwise"]


def unknown(call: Call, ledger: Ledger) -> Value:
    """What enters stays, with the operation as the reason; what comes out is no channel of anybody's."""
    return lock_operands(call, ledger, f"{call.site} is not understood")


@rule("_assert_tensor_metadata", "_assert_async", "_assert_scalar")
def check(call: Call, ledger: Ledger) -> Value:
    """Checks that export writes down; they return nothing and move nothing."""


def lock_operands(call: Call, ledger: Ledger, reason: str) -> Value:
    """Lock every operand; the result has the size it has."""
    for labels in call.operands(ledger):
        ledger.lock(labels, reason)
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
