"""Products with a stored weight: they consume the channels they read, make new ones and cost multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recoup.algebra.patches import Window
from recoup.labels.arrays import along
from recoup.labels.constraints import Constraints, Product, TensorRef
from recoup.operators.call import LabelCall, Value


def is_stored(weight: Value, bias: Value = None) -> bool:
    """Whether a layer's weight and bias are tensors of the model."""
    return isinstance(weight, TensorRef) and (bias is None or isinstance(bias, TensorRef))


def read_plainly(call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    """A linear layer reads its input as it is, along the last dim."""
    return call["input"].detach(), None


def dense(
    call: LabelCall,
    constraints: Constraints,
    weight: TensorRef,
    bias: TensorRef | None,
    *,
    dim: int,
    input_dim: int,
    read: Value = None,
) -> Tensor:
    """Every output sums over all inputs: channels lie along `dim` of the operand and of the result."""
    value = call.args[0] if read is None else read
    labels = constraints.labels_of(value)
    inputs = constraints.channels_along(labels, dim, f"{call.site} reads it beside inputs of fixed size")
    outputs = constraints.outputs(weight, 1 - input_dim)
    constraints.site(weight, input_dim, inputs)
    if bias is not None:
        constraints.site(bias, 0, outputs)
    is_transposed = input_dim == 0 and len(weight.shape) > 2
    positions = positions_of(tuple(labels.shape) if is_transposed else call.shape, dim)
    constraints.products.append(product_of(call, weight, bias, positions, input_dim, 1 - input_dim))
    return along(outputs, dim, call.shape)


def positions_of(shape: tuple[int, ...], dim: int) -> int:
    """How many positions a value has beside its channels."""
    return math.prod(shape) // shape[dim]


def product_of(
    call: LabelCall, weight: TensorRef, bias: TensorRef | None, positions: int, input_dim: int | None, output_dim: int
) -> Product:
    """The record of one call, by which it is found in the graph, refitted and priced."""
    kernel = math.prod(weight.shape[2:])
    name = bias.name if bias is not None else None
    return Product(weight.name, name, positions, kernel, input_dim, output_dim, call.where, call.node)
