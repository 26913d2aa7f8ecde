"""Convolutions, plain and transposed, dense and grouped: they read the dim before the positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from recoup.algebra.patches import Window, stuff
from recoup.labels.arrays import along
from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import product
from recoup.operators.products import dense, is_stored, positions_of, product_of
from recoup.operators.record import LayerCall, operator
from recoup.operators.resizing import groups_at, parts_left

_PLAIN = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_EITHER = (*_PLAIN[:6], "transposed", "output_padding", "groups")


def window_of(call: Mapping[str, Any], kernel: tuple[int, ...]) -> Window:
    """Kernel, stride, dilation and padding of a convolution's call."""
    stride = _per_dim(call.get("stride", 1), kernel)
    dilation = _per_dim(call.get("dilation", 1), kernel)
    padding = call.get("padding", 0)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return Window(kernel, stride, dilation, tuple((n // 2, n - n // 2) for n in total))
    return Window(kernel, stride, dilation, tuple((n, n) for n in _per_dim(padding, kernel)))


def _read(call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    inputs, kernel = _batched(call)
    return inputs, window_of(call, kernel)


def _read_transposed(call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    """A window of stride 1, its kernel flipped, over the input with zeros between."""
    inputs, kernel = _batched(call)
    dilation, padding, extra = (
        _per_dim(call.get(name, default), kernel)
        for name, default in (("dilation", 1), ("padding", 0), ("output_padding", 0))
    )
    reach = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    border = tuple((n, n + more) for n, more in zip(reach, extra, strict=True))
    window = Window(kernel, (1,) * len(kernel), dilation, border, flipped=True)
    return stuff(inputs, _per_dim(call.get("stride", 1), kernel)), window


def _read_either(call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    return _read_transposed(call) if call.get("transposed", False) else _read(call)


def _batched(call: Mapping[str, Any]) -> tuple[Tensor, tuple[int, ...]]:
    """The input with a batch dim, and the sizes of the kernel."""
    inputs, kernel = call["input"].detach(), tuple(call["weight"].shape[2:])
    return (inputs if inputs.dim() == len(kernel) + 2 else inputs[None]), kernel


def _per_dim(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * len(kernel) if len(values) == 1 else values


def _refresh(module: _ConvNd, rows: Tensor | None) -> None:
    """A group that has lost all of its rows of the weight is gone."""
    before = module.in_channels if module.transposed else module.out_channels
    if rows is not None:
        module.groups = parts_left(rows, before, module.groups)
    first, second = module.weight.shape[0], module.weight.shape[1] * module.groups
    module.in_channels, module.out_channels = (first, second) if module.transposed else (second, first)


@operator(
    "conv1d",
    "conv2d",
    "conv3d",
    resize=groups_at(6),
    differential=product,
    layer=LayerCall(_PLAIN, _read, adds_bias=True, has_window=True),
    weights=(1, 2),
    modules={_ConvNd: _refresh},
)
def convolution(call: LabelCall, constraints: Constraints) -> Value:
    """Every output sums over all inputs of its group."""
    return _convolve(call, constraints, call.argument(6, "groups", 1), transposed=False)


@operator(
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    resize=groups_at(6),
    differential=product,
    layer=LayerCall(_TRANSPOSED, _read_transposed, adds_bias=True, transposed=True, has_window=True),
    weights=(1, 2),
)
def transposed_convolution(call: LabelCall, constraints: Constraints) -> Value:
    """Its weight has the inputs first."""
    return _convolve(call, constraints, call.argument(6, "groups", 1), transposed=True)


@operator("convolution", resize=groups_at(8), layer=LayerCall(_EITHER, _read_either, has_window=True), weights=(1, 2))
def any_convolution(call: LabelCall, constraints: Constraints) -> Value:
    """The form that serves both."""
    return _convolve(call, constraints, call.args[8], transposed=bool(call.args[6]))


def _convolve(call: LabelCall, constraints: Constraints, groups: int, *, transposed: bool) -> Value:
    weight, bias = call.args[1], call.argument(2, "bias")
    if not is_stored(weight, bias):
        return lock_operands(call, constraints, f"{call.site} has a weight that depends on the input")
    dim = len(call.shape) - len(weight.shape[2:]) - 1  # 1, or 0 for a single sample without a batch
    if groups == 1:
        return dense(call, constraints, weight, bias, dim=dim, input_dim=0 if transposed else 1)
    return _grouped(call, constraints, dim, groups, transposed=transposed)


def _grouped(call: LabelCall, constraints: Constraints, dim: int, groups: int, *, transposed: bool) -> Tensor:
    """Inputs and outputs of a depthwise convolution go together; with more of them per group that is left open."""
    weight, bias = call.args[1], call.argument(2, "bias")
    labels = constraints.labels_of(call.args[0])
    channels = constraints.channels_along(labels, dim, call.site)
    reason = f"{call.site} is grouped and reads it beside inputs of fixed size"
    if len(channels) == call.shape[dim] == groups:
        outputs = channels
    else:
        inputs, count = channels.view(groups, -1), call.shape[dim]
        outputs = constraints.outputs_in_parts(weight.name, inputs, count, reason, transposed=transposed)
    constraints.site(weight, 0, channels if transposed else outputs)
    if bias is not None:
        constraints.site(bias, 0, outputs)
    positions = positions_of(tuple(labels.shape) if transposed else call.shape, dim)
    constraints.products.append(product_of(call, weight, bias, positions, None, 1 if transposed else 0))
    return along(outputs, dim, call.shape)
