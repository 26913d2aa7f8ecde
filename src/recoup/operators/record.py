"""The record of an operator, and the table of all of them by name.

A family of operators is one file beside this one. It enters a label rule together with everything else that is known:

    @operator("group_norm", weights=(2, 3), resize=groups_at(1))
    def group_norm(call, constraints): ...

An operator without a record that carries torch's `pointwise` tag is taken for a pointwise one. Any other locks the
channels that reach it, and `recoup.inspect` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from recoup.algebra.patches import Window
from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import Derive
from recoup.operators.names import argument, operation_name
from recoup.operators.resizing import Resize, unchanged

# From a call with labels in the place of tensors to the labels of its result.
Propagate: TypeAlias = Callable[[LabelCall, Constraints], Value]
# From the arguments of a layer's call, by name, to what it reads and the window it does so by (None: linear).
Read: TypeAlias = Callable[[Mapping[str, Any]], tuple[Tensor, Window | None]]
# The letters of the dims of its operands: those with one letter are multiplied over together, None plays no part.
Letters: TypeAlias = Sequence[Any]
# From a call that multiplies activations to its products, each given by operands and their letters; None if unknown.
Pair: TypeAlias = Callable[[fx.Node], "list[list[tuple[fx.Node, Letters]]] | None"]
# Brings the sizes that a module remembers in line with its tensors, given which rows of its weight remain (None: all).
Refresh: TypeAlias = Callable[[Any, "Tensor | None"], None]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How an operator is called that multiplies by a weight: the names of its `arguments` in order, what it reads.

    `adds_bias` says that a bias can be put into the call; `transposed` that the weight has its inputs first;
    `has_window` that it reads patches, and its outputs lie before the positions instead of along the last dim.
    """

    arguments: tuple[str, ...]
    read: Read
    adds_bias: bool = False
    transposed: bool = False
    has_window: bool = False

    def argument(self, node: fx.Node, name: str, default: Any = None) -> Any:
        """An argument of a call by its name."""
        place = self.arguments.index(name) if name in self.arguments else len(node.args)
        return argument(node, place, name, default)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a call reads to multiply by one of its weights, with the window it does so by (None: linear).

    Of a call with several weights (`is_part`), what one of them makes of `inputs` is computed here.
    """

    weight: Any
    inputs: Tensor
    window: Window | None = None
    is_part: bool = False
    bias: Any = None

    def outputs(self, result: Any) -> Tensor:
        """What the weight makes of it, given what the call returned."""
        made: Tensor = F.linear(self.inputs, self.weight, self.bias) if self.is_part else result
        return made


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """How an operator is called that multiplies by several weights, step by step along a sequence.

    `layers` gives them from the arguments of a call, be these nodes or tensors, each with its bias or None; `read` what
    is read for each of them, in the same order, given the function that is called, its arguments and what it returned.
    """

    layers: Callable[[Sequence[Any]], Sequence[tuple[Any, Any]]]
    read: Callable[[Callable[..., Any], Sequence[Any], Any], Iterator[Reading]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """All that is known of an operator.

    propagate: how channel labels pass through it, what it ties and locks, and what it costs.
    resize: what it is called with once channels are gone.
    differential: how its result moves with its operands; None where it acts on each value alone, or is left to torch.
    layer: how to read its call, for a product with a weight.
    recurrent: the same for one with several weights, which it multiplies by at every step of a sequence.
    pair: which dims of activations it multiplies over, for what a product of them costs.
    macs: multiply-accumulates of a call that torch does not count.
    require: raises a RuntimeError for arguments that do not fit, where torch itself would read beyond their ends.
    weights: places of operands that are stored tensors, or can be computed once and stored.
    is_movement: it only puts elements elsewhere.
    is_pointwise: it acts on each element by itself.
    is_channelwise: it acts on each channel by itself, along dim 1, given stored tensors.
    affine_in: places of the operand that it only scales and shifts, given stored tensors.
    is_addition: it adds two operands.
    is_pooling: it puts the positions of a channel together.
    gives_number: it gives a size, or arithmetic on sizes, and no tensor.
    returns_input: in eval mode its result is its input, not a copy.
    is_check: it checks something and returns nothing.
    flops: operations per element of its result, as the paper counts them beside the products of layers.
    modules: the module classes that call it and remember sizes, and how to refresh these.
    """

    propagate: Propagate
    resize: Resize = unchanged
    differential: Derive | None = None
    layer: LayerCall | None = None
    recurrent: RecurrentCall | None = None
    pair: Pair | None = None
    macs: Callable[[fx.Node], int] | None = None
    require: Callable[[Sequence[Any]], None] | None = None
    weights: tuple[int, ...] = ()
    is_movement: bool = False
    is_pointwise: bool = False
    is_channelwise: bool = False
    affine_in: tuple[int, ...] = ()
    is_addition: bool = False
    is_pooling: bool = False
    gives_number: bool = False
    returns_input: bool = False
    is_check: bool = False
    flops: int = 0
    modules: Mapping[type[nn.Module], Refresh] = field(default_factory=dict)


_OPERATORS: dict[str, Operator] = {}
_REFRESH: dict[type[nn.Module], Refresh] = {}
POINTWISE = "pointwise"


def operator(*names: str, **facts: Any) -> Callable[[Propagate], Propagate]:
    """Enter a label rule, and what else is known of them, under these operator names."""

    def enter(propagate: Propagate) -> Propagate:
        record = Operator(propagate=propagate, **facts)
        if known := sorted(_OPERATORS.keys() & set(names)):
            raise ValueError(f"{', '.join(known)}: an operator has one record, and there is one already.")
        _OPERATORS.update(dict.fromkeys(names, record))
        _REFRESH.update(record.modules)
        return propagate

    return enter


def operator_of(target: Any) -> Operator:
    """The record of an operation: by name, by its being pointwise, or the one that locks what it does not know."""
    found = _OPERATORS.get(operation_name(target))
    if found is not None:
        return found
    return _OPERATORS[POINTWISE] if torch.Tag.pointwise in getattr(target, "tags", ()) else UNKNOWN


def known_operators() -> Mapping[str, Operator]:
    """All records by name."""
    return MappingProxyType(_OPERATORS)


def refresh_of(module: nn.Module) -> Refresh | None:
    """What brings the sizes that a module remembers in line with its tensors, if anything has to."""
    return next((refresh for kind, refresh in _REFRESH.items() if isinstance(module, kind)), None)


def weights_of(node: fx.Node) -> tuple[Any, ...]:
    """What a call has in the places of its weights, in the order of its readings; nothing if it is no layer."""
    record = operator_of(node.target)
    if record.layer is not None:
        return (record.layer.argument(node, "weight"),)
    return () if record.recurrent is None else tuple(weight for weight, _ in record.recurrent.layers(node.args))


def biases_of(node: fx.Node) -> tuple[Any, ...]:
    """The biases beside them, None for one that is not there."""
    record = operator_of(node.target)
    if record.layer is not None:
        return (record.layer.argument(node, "bias"),)
    return () if record.recurrent is None else tuple(bias for _, bias in record.recurrent.layers(node.args))


def remembers_sizes(kind: str) -> bool:
    """Whether modules of a class, by its full name, remember sizes that are brought in line with their tensors."""
    return any(f"{known.__module__}.{known.__qualname__}" == kind for known in _REFRESH)


def is_movement(node: fx.Node) -> bool:
    """Whether the operation only puts elements elsewhere."""
    return node.op == "call_function" and operator_of(node.target).is_movement


def is_carrier(node: fx.Node) -> bool:
    """Whether the operation moves elements, or acts on each element of one tensor by itself.

    Behind a carrier an element is still the one it was, or a function of it alone. A chain of carriers may pass through
    shapes of which no rectangle remains, as a channel shuffle does, as long as it ends in one.
    """
    if node.op != "call_function":
        return False
    record = operator_of(node.target)
    return record.is_movement or (record.is_pointwise and len(node.all_input_nodes) == 1)


def unknown(call: LabelCall, constraints: Constraints) -> Value:
    """What enters stays, with the operation as the reason; what comes out is no channel of anybody's."""
    return lock_operands(call, constraints, f"{call.site} is not understood")


UNKNOWN = Operator(propagate=unknown)
