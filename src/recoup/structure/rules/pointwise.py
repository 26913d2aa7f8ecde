"""Pointwise operations: one operand passes its labels on, several couple the labels that meet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recoup.structure.labels import FIXED, NONE, compress, varies
from recoup.structure.ledger import Ledger, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule, unlabelled

# Pointwise in what they compute, but without torch's tag.
UNTAGGED = (
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "contiguous", "to",
    "_to_copy", "type_as", "alias", "detach", "lift_fresh_copy", "lift_fresh", "hardswish", "hardsigmoid", "relu6",
    "selu", "rrelu", "log_sigmoid", "softplus", "mish", "hardshrink", "softshrink", "where", "square",
)  # fmt: skip


@rule("pointwise", *UNTAGGED)
def pointwise(call: Call, ledger: Ledger) -> Value:
    """Couple what meets; an operand of length 1 where others have channels scales them all and is none of them."""
    operands = call.operands(ledger)
    if not operands or not isinstance(call.shape, torch.Size):
        return unlabelled(call.shape)
    spread = [_gate(labels, operands, call, ledger) for labels in operands]
    result = spread[0]
    for labels in spread[1:]:
        result = ledger.couple(result, labels, f"{call.site} meets a tensor of fixed size")
    return result.expand(call.shape)


@rule("prelu")
def prelu(call: Call, ledger: Ledger) -> Value:
    """The slopes, one for all or one per channel of dim 1, follow the channels."""
    labels, slopes = ledger.labels_of(call.args[0]), call.args[1]
    if not isinstance(slopes, TensorRef):
        return lock_operands(call, ledger, f"{call.site} has slopes that are computed, not stored")
    if math.prod(slopes.shape) > 1:
        ledger.site(slopes, 0, ledger.channels_along(labels, 1, call.site))
    return labels


@rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(call: Call, ledger: Ledger) -> Value:
    """Over positions it is pointwise to a channel; over channels it mixes them."""
    labels = ledger.labels_of(call.args[0])
    if varies(labels, call.argument(1, "dim")):
        ledger.lock(labels, f"{call.site} normalises over channels")
    return labels


def _gate(labels: Tensor, operands: list[Tensor], call: Call, ledger: Ledger) -> Tensor:
    """`labels` spread over the result's shape, with NONE where it has length 1 along a dim of channels."""
    wide = compress(labels.expand(call.shape))
    if labels.shape == call.shape:
        return wide
    for other in operands:
        behind = other.dim() - labels.dim()
        for dim in range(other.dim()):
            own = dim - behind
            stretched = (own < 0 or labels.shape[own] == 1) and other.shape[dim] > 1
            if stretched and varies(compress(other), dim):
                ledger.lock(labels, f"{call.site} spreads it over the channels of another tensor")
                return torch.full((), NONE).expand(call.shape)
    return torch.where(wide == FIXED, NONE, wide) if not labels.dim() else wide
