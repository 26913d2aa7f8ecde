"""Propagation of channel labels through the captured graph; what it finds out goes into the constraints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from recoup.graph.capture import Captured, module_path
from recoup.graph.code import code_line
from recoup.graph.index_numbers import index_numbers
from recoup.graph.memory import memory_of
from recoup.graph.runner import arguments, call
from recoup.graph.usage import written_tensors
from recoup.labels.arrays import FIXED, NONE, compress, constant, varying_dims
from recoup.labels.constraints import RETURNED, Computed, Constraints, TensorRef
from recoup.operators.call import LabelCall, lock_operands
from recoup.operators.names import operation_name, writes
from recoup.operators.record import is_carrier, operator_of, remembers_sizes, unknown


@dataclass(frozen=True, slots=True, eq=False)
class Propagated:
    """The constraints, and the labels of every value in the graph by the name of its node."""

    constraints: Constraints
    labels: Mapping[str, Any]


def propagate(
    captured: Captured, *, sizes_stay: bool = False, frees_norms: bool = False, notes_sums: bool = False
) -> Propagated:
    """Follow labels from the inputs to the outputs; what reaches an output is locked."""
    constraints = Constraints(sizes_stay=sizes_stay, frees_norms=frees_norms, notes_sums=notes_sums)
    values: dict[fx.Node, Any] = {}
    moving, numbers = written_tensors(captured), index_numbers(captured)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(node, captured, moving)
        elif node.name in numbers:
            values[node] = _referred(node.name, numbers[node.name])
        elif node.op == "call_function":
            values[node] = _compressed(_follow(node, values, constraints))
            constraints.at = constraints.line = ""
        elif node.op == "get_attr":
            values[node] = None
        elif node.op == "output":
            fx.node.map_arg(node.args, lambda result: _lock_output(values[result], constraints))
    return Propagated(constraints, {node.name: value for node, value in values.items()})


def _referred(name: str, value: Any) -> Any:
    """Numbers that the code computes as if they were stored under a name."""
    if isinstance(value, Tensor):
        return TensorRef(name, value)
    return [_referred(name, part) for part in value]


def shape_of(value: Any) -> Any:
    """Size of a recorded result, or a list of sizes; a dim whose size depends on values counts as one."""
    if isinstance(value, Tensor):
        return torch.Size(1 if free_unbacked_symbols(size) else size for size in value.shape)
    return [shape_of(part) for part in value] if isinstance(value, (list, tuple)) else None


def _depends_on_values(value: Any) -> bool:
    """Whether a size of a recorded result, or the number itself, is known only when values are, as nonzero's is."""
    if isinstance(value, (list, tuple)):
        return any(_depends_on_values(part) for part in value)
    return isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(
        free_unbacked_symbols(value)
    )


def _placeholder(node: fx.Node, captured: Captured, moving: Collection[str]) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    name = captured.tensors.get(node.name)
    is_number = not value.is_floating_point()
    if name is not None and name not in captured.constants and not (is_number and name in moving):
        return TensorRef(name, captured.values[node.name])
    if name in captured.constants and is_number:
        return TensorRef(name, captured.values[node.name])  # numbers to index by
    return constant(value.shape, FIXED if value.numel() > 1 else NONE)


def _follow(node: fx.Node, values: dict[fx.Node, Any], constraints: Constraints) -> Any:
    if _is_of_numbers(node, values):
        return TensorRef(node.name, call(node, lambda source: values[source].value))
    args, kwargs = arguments(node, values.__getitem__)
    name, shape = operation_name(node.target), shape_of(node.meta.get("val"))
    labelled = LabelCall(node.target, name, module_path(node), node.name, args, kwargs, shape, _is_of_torch(node))
    constraints.at, constraints.line = labelled.site, code_line(node)
    if any(_depends_on_values(value.meta.get("val")) for value in (node, *node.all_input_nodes)):
        return lock_operands(labelled, constraints, f"{labelled.site}: a size there depends on the values of a tensor")
    if any(isinstance(value, TensorRef) and value.value.is_complex() for value in (*args, *kwargs.values())):
        return lock_operands(
            labelled, constraints, f"{labelled.site} computes with complex weights, which are not refitted"
        )
    try:
        result = operator_of(node.target).propagate(labelled, constraints)
    except (TypeError, ValueError, IndexError, RuntimeError, AttributeError):  # a form of the call no rule expects
        result = unknown(labelled, constraints)
    if not _shapes_agree(result, shape):
        result = unknown(labelled, constraints)
    if writes(node) and _is_a_view(node.all_input_nodes[0]):
        _lock_base(node.all_input_nodes[0], values, constraints, f"{labelled.site} writes into a part of it")
    if not is_carrier(node):
        _remember_boxes([*args, *kwargs.values(), result], constraints)
    return result


def _is_of_torch(node: fx.Node) -> bool:
    """Whether a module makes the call that remembers its sizes, and is known to be of torch's own class."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return bool(stack) and remembers_sizes(str(stack[-1][1]))


def _is_a_view(value: fx.Node) -> bool:
    """Whether a value is part of a whole, or the whole in another form; what an operation in place gives is neither."""
    while value.op == "call_function" and writes(value):
        value = value.all_input_nodes[0]
    return memory_of(value) is not value


def _lock_base(view: fx.Node, values: dict[fx.Node, Any], constraints: Constraints, reason: str) -> None:
    """What is written into through a view keeps its size: in a smaller network the view may be a copy."""
    whole = memory_of(view)
    assert whole is not None
    base = values[whole]
    for part in base if isinstance(base, (list, tuple)) else [base]:
        if isinstance(part, (Tensor, TensorRef)):
            constraints.lock(constraints.labels_of(part), reason)


def _is_of_numbers(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a tensor is computed from stored indices alone, and so is one."""
    sources = [values[source] for source in node.all_input_nodes]
    if not sources or not isinstance(node.meta.get("val"), Tensor) or node.meta["val"].is_floating_point():
        return False
    if writes(node):  # into the model's own
        return False
    if operation_name(node.target) == "expand" and sources[0].shape != tuple(node.meta["val"].shape):
        return False  # copies may go where the channels go that they are for
    return all(isinstance(value, TensorRef) and not value.value.is_floating_point() for value in sources)


def _remember_boxes(values: list[Any], constraints: Constraints) -> None:
    for value in values:
        if isinstance(value, (list, tuple)):
            _remember_boxes(list(value), constraints)
        elif isinstance(value, Tensor) and len(varying_dims(value)) > 1:
            constraints.boxes.append(Computed(value, constraints.located(constraints.at)))


def _shapes_agree(result: Any, shape: Any) -> bool:
    if isinstance(result, Tensor):
        return tuple(result.shape) == tuple(shape)
    if isinstance(result, (list, tuple)):
        return all(_shapes_agree(*pair) for pair in zip(result, shape, strict=False))
    return True


def _compressed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return compress(value)
    return [_compressed(part) for part in value] if isinstance(value, (list, tuple)) else value


def _lock_output(value: Any, constraints: Constraints) -> None:
    for part in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(part, (Tensor, TensorRef)):
            constraints.lock(constraints.labels_of(part), RETURNED)
