"""Contractions: layers that multiply by a stored weight consume the channels they read and make new ones."""

from __future__ import annotations

import math

from torch import Tensor

from recoup.structure.labels import along
from recoup.structure.ledger import Ledger, Product, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule


@rule("linear")
def linear(call: Call, ledger: Ledger) -> Value:
    """Reads the last dim."""
    weight, bias = call.args[1], call.argument(2, "bias")
    if not is_stored(weight, bias):
        return lock_operands(call, ledger, f"{call.site} has a weight that depends on the input")
    return dense(call, ledger, weight, bias, dim=len(call.shape) - 1, input_dim=1)


@rule("addmm")
def addmm(call: Call, ledger: Ledger) -> Value:
    """A linear layer written as bias + x @ weight."""
    bias, _, weight = call.args[:3]
    plain = call.argument(3, "beta", 1) == 1 and call.argument(4, "alpha", 1) == 1
    if not is_stored(weight, bias) or not plain or len(bias.shape) != 1:
        return lock_operands(call, ledger, f"{call.site} has a weight that depends on the input")
    return dense(call, ledger, weight, bias, dim=1, input_dim=0, read=call.args[1])


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call, ledger: Ledger) -> Value:
    """Reads the dim before the positions."""
    return _convolve(call, ledger, call.argument(6, "groups", 1), transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call, ledger: Ledger) -> Value:
    """Its weight has the inputs first."""
    return _convolve(call, ledger, call.argument(6, "groups", 1), transposed=True)


@rule("convolution")
def any_convolution(call: Call, ledger: Ledger) -> Value:
    """The form that serves both."""
    return _convolve(call, ledger, call.args[8], transposed=bool(call.args[6]))


@rule("embedding")
def embedding(call: Call, ledger: Ledger) -> Value:
    """Looks rows up: its channels are the columns of the table."""
    weight = call.args[0]
    if not isinstance(weight, TensorRef):
        return lock_operands(call, ledger, f"{call.site} has a weight that depends on the input")
    return along(ledger.outputs(weight, 1), len(call.shape) - 1, call.shape)


@rule("bilinear")
def bilinear(call: Call, ledger: Ledger) -> Value:
    """Makes channels; what it reads stays, as it is multiplied in pairs."""
    weight, bias = call.args[2], call.argument(3, "bias")
    if not is_stored(weight, bias):
        return lock_operands(call, ledger, f"{call.site} has a weight that depends on the input")
    for value in call.args[:2]:
        ledger.lock(ledger.labels_of(value), f"{call.site} multiplies its inputs in pairs")
    outputs = ledger.outputs(weight, 0)
    if bias is not None:
        ledger.site(bias, 0, outputs)
    return along(outputs, len(call.shape) - 1, call.shape)


def is_stored(weight: Value, bias: Value = None) -> bool:
    """Whether a layer's weight and bias are tensors of the model."""
    return isinstance(weight, TensorRef) and (bias is None or isinstance(bias, TensorRef))


def dense(
    call: Call,
    ledger: Ledger,
    weight: TensorRef,
    bias: TensorRef | None,
    *,
    dim: int,
    input_dim: int,
    read: Value = None,
) -> Tensor:
    """Every output sums over all inputs: channels lie along `dim` of the operand and of the result."""
    value = call.args[0] if read is None else read
    labels = ledger.labels_of(value)
    inputs = ledger.channels_along(labels, dim, f"{call.site} reads it beside inputs of fixed size")
    outputs = ledger.outputs(weight, 1 - input_dim)
    ledger.site(weight, input_dim, inputs)
    if bias is not None:
        ledger.site(bias, 0, outputs)
    is_transposed = input_dim == 0 and len(weight.shape) > 2
    positions = _positions(tuple(labels.shape) if is_transposed else call.shape, dim)
    ledger.products.append(_product(call, weight, bias, positions, input_dim, 1 - input_dim))
    return along(outputs, dim, call.shape)


def _convolve(call: Call, ledger: Ledger, groups: int, *, transposed: bool) -> Value:
    weight, bias = call.args[1], call.argument(2, "bias")
    if not is_stored(weight, bias):
        return lock_operands(call, ledger, f"{call.site} has a weight that depends on the input")
    dim = len(call.shape) - len(weight.shape[2:]) - 1  # 1, or 0 for a single sample without a batch
    if groups == 1:
        return dense(call, ledger, weight, bias, dim=dim, input_dim=0 if transposed else 1)
    return _grouped(call, ledger, dim, groups, transposed=transposed)


def _grouped(call: Call, ledger: Ledger, dim: int, groups: int, *, transposed: bool) -> Tensor:
    """Inputs and outputs of one group go together: a depthwise convolution has one of each."""
    weight, bias = call.args[1], call.argument(2, "bias")
    labels = ledger.labels_of(call.args[0])
    channels = ledger.channels_along(labels, dim, call.site)
    reason = f"{call.site} is grouped and reads it beside inputs of fixed size"
    group_of = ledger.tie(channels.view(groups, -1), reason)
    outputs = group_of.repeat_interleave(call.shape[dim] // groups)
    inputs = group_of.repeat_interleave(len(channels) // groups)
    ledger.site(weight, 0, inputs if transposed else outputs)
    if bias is not None:
        ledger.site(bias, 0, outputs)
    positions = _positions(tuple(labels.shape) if transposed else call.shape, dim)
    ledger.products.append(_product(call, weight, bias, positions, None, 1 if transposed else 0))
    return along(outputs, dim, call.shape)


def _positions(shape: tuple[int, ...], dim: int) -> int:
    return math.prod(shape) // shape[dim]


def _product(
    call: Call, weight: TensorRef, bias: TensorRef | None, positions: int, input_dim: int | None, output_dim: int
) -> Product:
    kernel = math.prod(weight.shape[2:])
    name = bias.name if bias is not None else None
    return Product(weight.name, name, positions, kernel, input_dim, output_dim, call.where, call.node)
