"""Pointwise operations: one operand passes its labels on, several couple the labels that meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recoup.structure.labels import NONE, compress, core, varying_dims
from recoup.structure.ledger import Ledger, Meeting, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule, unlabelled

# Pointwise in what they compute, but without torch's tag.
UNTAGGED = (
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "contiguous", "to",
    "_to_copy", "type_as", "alias", "detach", "lift_fresh_copy", "lift_fresh", "hardswish", "hardsigmoid", "relu6",
    "selu", "rrelu", "log_sigmoid", "softplus", "mish", "hardshrink", "softshrink", "where", "square", "expand_as",
    "zeros_like", "ones_like", "full_like", "leaky_relu", "elu", "celu", "gelu", "silu", "hardtanh", "threshold",
    "zero", "fill", "clone", "copy",
)  # fmt: skip


@rule("pointwise", *UNTAGGED)
def pointwise(call: Call, ledger: Ledger) -> Value:
    """Couple what meets; an operand of length 1 where others have channels scales them all and is none of them."""
    operands = call.operands(ledger)
    if not operands or not isinstance(call.shape, torch.Size):
        return unlabelled(call.shape)
    return meet(operands, call.shape, call, ledger)


@rule("prelu")
def prelu(call: Call, ledger: Ledger) -> Value:
    """The slopes, one for all or one per channel of dim 1, follow the channels."""
    labels, slopes = ledger.labels_of(call.args[0]), call.args[1]
    if not isinstance(slopes, TensorRef):
        return lock_operands(call, ledger, f"{call.site} has slopes that depend on the input")
    if math.prod(slopes.shape) > 1:
        ledger.site(slopes, 0, ledger.channels_along(labels, 1, call.site))
    return labels


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp")
def along_one_dim(call: Call, ledger: Ledger) -> Value:
    """Over positions it is pointwise to a channel; over channels it mixes them."""
    labels = ledger.labels_of(call.args[0])
    dim = call.argument(1, "dim") % max(1, labels.dim())
    mixed = ledger.mix(labels, [dim], f"{call.site} runs over channels")
    return labels if mixed is None else mixed


@rule("glu")
def glu(call: Call, ledger: Ledger) -> Value:
    """Half of the channels gate the other half, each its own one."""
    labels = ledger.labels_of(call.args[0])
    left, right = labels.chunk(2, call.argument(1, "dim", -1))
    return ledger.couple(left, right, f"{call.site} gates it with a tensor of fixed size")


def meet(operands: Sequence[Tensor], shape: Sequence[int], call: Call, ledger: Ledger) -> Tensor:
    """Labels where operands meet element by element, after broadcasting to `shape`."""
    spread = [compress(labels.expand(tuple(shape))) for labels in operands]
    dims = [set(varying_dims(labels)) for labels in spread]
    result = torch.full((), NONE).expand(tuple(shape))
    for number, (labels, wide) in enumerate(zip(operands, spread, strict=True)):
        others = set().union(*dims[:number], *dims[number + 1 :])
        result = _met(labels, wide, others, result, call, ledger)
    for labels, wide in zip(operands, spread, strict=True):
        _postpone(labels, wide, result, call, ledger)
    return result.expand(tuple(shape))


def _met(labels: Tensor, wide: Tensor, others: set[int], result: Tensor, call: Call, ledger: Ledger) -> Tensor:
    """`result` after meeting one more operand; one that is stretched over other operands' channels is none of them."""
    stretched = others & _stretched(labels, wide.shape)
    if stretched and not others - stretched:
        ledger.lock(labels, f"{call.site} spreads it over the channels of another tensor")
        return result
    if stretched or (others and not _has_labels(wide)):
        return result
    return ledger.couple(result, wide, f"{call.site} meets a tensor of fixed size")


def _postpone(labels: Tensor, wide: Tensor, result: Tensor, call: Call, ledger: Ledger) -> None:
    """Stretched along some dims of channels and not along others: coupled once it is known which ones count."""
    channels = set(varying_dims(compress(result)))
    stretched = _stretched(labels, wide.shape)
    real = channels - stretched
    if real and (channels & stretched or not _has_labels(wide)):
        reason = f"{call.site} meets a tensor of fixed size"
        ledger.meetings.append(Meeting(wide, result, frozenset(stretched), reason))


def _has_labels(labels: Tensor) -> bool:
    (small,) = core(labels)
    return bool((small >= 0).any())


def _stretched(labels: Tensor, shape: Sequence[int]) -> set[int]:
    """Dims of the result along which an operand of length 1, or without that dim, is repeated."""
    behind = len(shape) - labels.dim()
    return {dim for dim, size in enumerate(shape) if size > 1 and (dim < behind or labels.shape[dim - behind] == 1)}
