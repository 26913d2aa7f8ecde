"""Indexing along one dim: reading places by number, writing and adding into places by number, as graph networks do.

Numbers may go along positions. Along every other dim the operands meet index by index, and are one channel there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.labels.arrays import NONE, collapse, constant, varying_dims
from recoup.labels.constraints import Constraints, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.record import operator


@operator("gather", "take_along_dim")
def gather(call: LabelCall, constraints: Constraints) -> Value:
    """By stored numbers it is a movement; by computed ones it may only move along positions."""
    labels = constraints.labels_of(call.args[0])
    dim, index = _dim(call, labels)
    if dim is None:
        return lock_operands(call, constraints, f"{call.site} takes elements from anywhere")
    if isinstance(index, TensorRef):
        return labels.gather(dim, index.value.cpu())
    numbers = constraints.labels_of(index)
    is_alone = call.name == "take_along_dim" and all(numbers.shape[d] == 1 for d in varying_dims(labels) if d != dim)
    if is_alone:  # the same numbers for all channels
        numbers = constant([1 if d == dim else n for d, n in enumerate(labels.shape)], NONE)
    return _meeting(call, constraints, dim, [labels, numbers])


def _dim(call: LabelCall, labels: Tensor) -> tuple[int | None, Value]:
    """The dim that the numbers go along, and the numbers; `take_along_dim` has them the other way round."""
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if call.name == "take_along_dim":
        dim, index = call.argument(2, "dim"), call.argument(1, "indices")
    return (None if dim is None else dim % labels.dim()), index


@operator("scatter", "scatter_add", "scatter_reduce")
def scatter(call: LabelCall, constraints: Constraints) -> Value:
    """There is a number for each element of what is put in."""
    operands = [constraints.labels_of(value) for value in (call.args[0], *call.args[2:4]) if _is_tensor(value)]
    dim = call.args[1] % operands[0].dim()
    return _meeting(call, constraints, dim, [operand for operand in operands if operand.dim()])


@operator("index_add", "index_copy", "index_reduce", "index_fill")
def index_add(call: LabelCall, constraints: Constraints) -> Value:
    """There is a number for each place along the dim."""
    operands = [
        constraints.labels_of(value) for value in (call.args[0], call.argument(3, "source")) if _is_tensor(value)
    ]
    dim = call.args[1] % operands[0].dim()
    return _meeting(call, constraints, dim, [operand for operand in operands if operand.dim()])


def _is_tensor(value: Value) -> bool:
    return isinstance(value, (Tensor, TensorRef))


def _meeting(call: LabelCall, constraints: Constraints, dim: int, operands: list[Tensor]) -> Value:
    """Labels of the result: what the operands have in common along all dims but `dim`."""
    sizes = {torch.Size(n for d, n in enumerate(labels.shape) if d != dim) for labels in operands}
    mixed = [constraints.mix(labels, [dim], f"{call.site} picks channels by number") for labels in operands]
    if len(sizes) > 1 or any(labels is None for labels in mixed):
        return lock_operands(call, constraints, f"{call.site} picks channels by number")
    result, *others = (collapse(labels, [dim], keepdim=True) for labels in mixed if labels is not None)
    for labels in others:
        result = constraints.couple(result, labels, f"{call.site} meets a tensor of fixed size")
    return result.expand(call.shape)
