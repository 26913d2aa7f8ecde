"""Pointwise operations: one operand passes its labels on, several couple the labels that meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recoup.labels.arrays import NONE, compress, core, varying_dims
from recoup.labels.constraints import Constraints, Meeting, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands, unlabelled
from recoup.operators.differential import Differential, RecordedCall, linear_in_first, product
from recoup.operators.record import POINTWISE, operator

# Pointwise in what they compute, but without torch's tag.
UNTAGGED = (
    "to", "_to_copy", "type_as", "detach", "lift_fresh_copy", "lift_fresh", "where", "square", "expand_as",
    "zeros_like", "ones_like", "full_like", "zero", "fill", "copy",
)  # fmt: skip
# What stands behind a layer to bend its outputs; some carry torch's tag, some do not.
ACTIVATIONS = (
    "relu", "relu6", "sigmoid", "tanh", "hardsigmoid", "selu", "rrelu", "log_sigmoid", "softplus", "mish",
    "hardshrink", "softshrink", "leaky_relu", "elu", "celu", "gelu", "silu", "hardtanh", "threshold",
)  # fmt: skip


def _dropped(call: RecordedCall) -> Differential | None:
    return None if call.operands[2] else lambda moves: moves[0]


def _summed(call: RecordedCall) -> Differential | None:
    factor = dict(zip(call.names, call.operands[len(call.operands) - len(call.names) :], strict=True)).get("alpha", 1)
    shape, dtype = call.result.shape, call.result.dtype

    def push(moves: Sequence[Any]) -> Any:
        left, right = moves[:2]
        if left is None:
            return (factor * right).expand(shape).to(dtype)
        return (left.expand(shape) if right is None else torch.add(left, right, alpha=factor)).to(dtype)

    return push


def _refresh_slopes(module: nn.PReLU, _: Tensor | None) -> None:
    module.num_parameters = len(module.weight)


def pointwise(call: LabelCall, constraints: Constraints) -> Value:
    """Couple what meets; an operand of length 1 where others have channels scales them all and is none of them."""
    operands = call.operands(constraints)
    if not operands or not isinstance(call.shape, torch.Size):
        return unlabelled(call.shape)
    return meet(operands, call.shape, call, constraints)


operator(POINTWISE, *UNTAGGED, is_pointwise=True)(pointwise)
operator(*ACTIVATIONS, is_pointwise=True, flops=1)(pointwise)
operator("hardswish", is_pointwise=True, is_channelwise=True, flops=1)(pointwise)
operator("dropout", is_pointwise=True, is_channelwise=True, affine_in=(0,), returns_input=True, differential=_dropped)(
    pointwise
)
operator("feature_dropout", is_pointwise=True, affine_in=(0,), returns_input=True)(pointwise)
operator("alpha_dropout", "feature_alpha_dropout", "native_dropout", is_pointwise=True, returns_input=True)(pointwise)
operator("clone", is_pointwise=True, affine_in=(0,), differential=linear_in_first)(pointwise)
operator("contiguous", "alias", is_pointwise=True, affine_in=(0,))(pointwise)
operator("add", is_pointwise=True, affine_in=(0, 1), is_addition=True, differential=_summed)(pointwise)
operator("mul", is_pointwise=True, affine_in=(0, 1), differential=product)(pointwise)
operator("sub", is_pointwise=True, affine_in=(0, 1))(pointwise)
operator("div", is_pointwise=True, affine_in=(0,))(pointwise)


@operator("prelu", weights=(1,), flops=1, modules={nn.PReLU: _refresh_slopes})
def prelu(call: LabelCall, constraints: Constraints) -> Value:
    """The slopes, one for all or one per channel of dim 1, follow the channels."""
    labels, slopes = constraints.labels_of(call.args[0]), call.args[1]
    if not isinstance(slopes, TensorRef):
        return lock_operands(call, constraints, f"{call.site} has slopes that depend on the input")
    if math.prod(slopes.shape) > 1:
        constraints.site(slopes, 0, constraints.channels_along(labels, 1, call.site))
    return labels


@operator("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp")
def along_one_dim(call: LabelCall, constraints: Constraints) -> Value:
    """Over positions it is pointwise to a channel; over channels it mixes them."""
    labels = constraints.labels_of(call.args[0])
    dim = call.argument(1, "dim") % max(1, labels.dim())
    mixed = constraints.mix(labels, [dim], f"{call.site} runs over channels")
    return labels if mixed is None else mixed


@operator("glu")
def glu(call: LabelCall, constraints: Constraints) -> Value:
    """Half of the channels gate the other half, each its own one."""
    labels = constraints.labels_of(call.args[0])
    left, right = labels.chunk(2, call.argument(1, "dim", -1))
    return constraints.couple(left, right, f"{call.site} gates it with a tensor of fixed size")


def meet(operands: Sequence[Tensor], shape: Sequence[int], call: LabelCall, constraints: Constraints) -> Tensor:
    """Labels where operands meet element by element, after broadcasting to `shape`."""
    spread = [compress(labels.expand(tuple(shape))) for labels in operands]
    dims = [set(varying_dims(labels)) for labels in spread]
    result = torch.full((), NONE).expand(tuple(shape))
    for number, (labels, wide) in enumerate(zip(operands, spread, strict=True)):
        others = set().union(*dims[:number], *dims[number + 1 :])
        result = _met(labels, wide, others, result, call, constraints)
    for labels, wide in zip(operands, spread, strict=True):
        _postpone(labels, wide, result, call, constraints)
    return result.expand(tuple(shape))


def _met(
    labels: Tensor, wide: Tensor, others: set[int], result: Tensor, call: LabelCall, constraints: Constraints
) -> Tensor:
    """`result` after meeting one more operand; one that is stretched over other operands' channels is none of them."""
    stretched = others & _stretched(labels, wide.shape)
    if stretched and not others - stretched:
        constraints.lock(labels, f"{call.site} spreads it over the channels of another tensor")
        return result
    if stretched or (others and not _has_labels(wide)):
        return result
    return constraints.couple(result, wide, f"{call.site} meets a tensor of fixed size")


def _postpone(labels: Tensor, wide: Tensor, result: Tensor, call: LabelCall, constraints: Constraints) -> None:
    """Stretched along some dims of channels and not along others: coupled once it is known which ones count."""
    channels = set(varying_dims(compress(result)))
    stretched = _stretched(labels, wide.shape)
    real = channels - stretched
    if real and (channels & stretched or not _has_labels(wide)):
        reason = constraints.located(f"{call.site} meets a tensor of fixed size")
        constraints.meetings.append(Meeting(wide, result, frozenset(stretched), reason))


def _has_labels(labels: Tensor) -> bool:
    (small,) = core(labels)
    return bool((small >= 0).any())


def _stretched(labels: Tensor, shape: Sequence[int]) -> set[int]:
    """Dims of the result along which an operand of length 1, or without that dim, is repeated."""
    behind = len(shape) - labels.dim()
    return {dim for dim, size in enumerate(shape) if size > 1 and (dim < behind or labels.shape[dim - behind] == 1)}
