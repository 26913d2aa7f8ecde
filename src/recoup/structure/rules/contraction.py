"""Contractions: layers that multiply by a weight consume the channels they read and make new ones."""

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
    if not _is_own(weight, bias):
        return lock_operands(call, ledger, f"{call.site} has a weight that is computed, not stored")
    return _dense(call, ledger, weight, bias, dim=len(call.shape) - 1)


@rule("conv1d", "conv2d", "conv3d", "convolution")
def convolution(call: Call, ledger: Ledger) -> Value:
    """Reads the dim before the positions; depthwise ones follow their channels, other grouped ones are locked."""
    weight, bias = call.args[1], call.argument(2, "bias")
    groups = call.argument(8 if call.name == "convolution" else 6, "groups", 1)
    if call.name == "convolution" and call.argument(6, "transposed", False):
        return lock_operands(call, ledger, f"{call.site} is transposed")
    if not _is_own(weight, bias):
        return lock_operands(call, ledger, f"{call.site} has a weight that is computed, not stored")
    dim = len(call.shape) - len(weight.shape[2:]) - 1  # 1, or 0 for a single sample without a batch
    if groups == 1:
        return _dense(call, ledger, weight, bias, dim)
    if groups == weight.shape[0] and weight.shape[1] == 1:
        return _depthwise(call, ledger, weight, bias, dim)
    return lock_operands(call, ledger, f"{call.site} is grouped ({groups} groups)")


def _dense(call: Call, ledger: Ledger, weight: TensorRef, bias: TensorRef | None, dim: int) -> Tensor:
    labels = ledger.labels_of(call.args[0])
    inputs = ledger.channels_along(labels, dim, f"{call.site} reads it beside inputs of fixed size")
    outputs = ledger.outputs(weight, weight.shape[0])
    ledger.site(weight, 1, inputs)
    if bias is not None:
        ledger.site(bias, 0, outputs)
    ledger.products.append(_product(call, weight, bias, dim, depthwise=False))
    return along(outputs, dim, call.shape)


def _depthwise(call: Call, ledger: Ledger, weight: TensorRef, bias: TensorRef | None, dim: int) -> Tensor:
    channels = ledger.channels_along(ledger.labels_of(call.args[0]), dim, call.site)
    for tensor in (weight, bias):
        if tensor is not None:
            ledger.site(tensor, 0, channels)
    ledger.products.append(_product(call, weight, bias, dim, depthwise=True))
    return along(channels, dim, call.shape)


def _product(call: Call, weight: TensorRef, bias: TensorRef | None, dim: int, *, depthwise: bool) -> Product:
    positions = math.prod(call.shape) // call.shape[dim]
    kernel, name_of_bias = math.prod(weight.shape[2:]), bias.name if bias else None
    return Product(weight.name, name_of_bias, positions, kernel, depthwise, call.where, call.node)


def _is_own(weight: Value, bias: Value) -> bool:
    return isinstance(weight, TensorRef) and (bias is None or isinstance(bias, TensorRef))
