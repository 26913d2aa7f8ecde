"""Normalisations: those of single channels follow them, those of several tie or hold them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from recoup.labels.arrays import along
from recoup.labels.constraints import Constraints, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import Differential, RecordedCall
from recoup.operators.record import operator
from recoup.operators.resizing import groups_at


def _scaled(call: RecordedCall) -> Differential | None:
    """A factor for every channel, of a batch norm that uses its statistics."""
    _, weight, _, mean, variance, is_training, _, eps, *_ = call.operands
    if any(call.moves[1:]) or is_training or mean is None or variance is None:
        return None
    factor = (variance.double() + eps).rsqrt() * (1.0 if weight is None else weight)
    factor = factor.to(call.result.dtype).reshape(-1, *[1] * (call.result.dim() - 2))
    return lambda moves: moves[0] * factor


def _refresh_features(module: _NormBase, _: Tensor | None) -> None:
    sized = module.weight if module.weight is not None else module.running_mean
    module.num_features = len(sized) if sized is not None else module.num_features


def _refresh_groups(module: nn.GroupNorm, _: Tensor | None) -> None:
    if module.weight is not None:
        module.num_groups = module.num_groups * len(module.weight) // module.num_channels
        module.num_channels = len(module.weight)


def per_channel(call: LabelCall, constraints: Constraints) -> Value:
    """Scale, shift and running statistics follow dim 1."""
    labels = constraints.labels_of(call.args[0])
    followers = [value for value in call.args[1:5] if value is not None]
    if not all(isinstance(value, TensorRef) for value in followers):
        return lock_operands(call, constraints, f"{call.site} has parameters that depend on the input")
    channels = constraints.channels_along(labels, 1, call.site)
    for tensor in followers:
        constraints.site(tensor, 0, channels)
    return labels if call.name != "_native_batch_norm_legit_no_training" else [labels, None, None]


operator(
    "batch_norm",
    differential=_scaled,
    weights=(1, 2, 3, 4),
    is_channelwise=True,
    affine_in=(0,),
    flops=2,
    modules={_NormBase: _refresh_features},
)(per_channel)
operator("instance_norm", weights=(1, 2, 3, 4))(per_channel)
operator("_native_batch_norm_legit_no_training", flops=2)(per_channel)


@operator("group_norm", resize=groups_at(1), weights=(2, 3), modules={nn.GroupNorm: _refresh_groups})
def group_norm(call: LabelCall, constraints: Constraints) -> Value:
    """The channels of one group are normalised together, so they go together."""
    labels, groups = constraints.labels_of(call.args[0]), call.args[1]
    followers = [call.argument(place, name) for place, name in ((2, "weight"), (3, "bias"))]
    followers = [value for value in followers if value is not None]
    if not all(isinstance(value, TensorRef) for value in followers):
        return lock_operands(call, constraints, f"{call.site} has parameters that depend on the input")
    channels = constraints.channels_along(labels, 1, call.site)
    if groups == 1:
        constraints.lock(channels, f"{call.site} normalises over all channels")
    elif groups < len(channels):
        tied = constraints.tie(channels.view(groups, -1), f"{call.site} normalises it beside channels of fixed number")
        channels = tied.repeat_interleave(len(channels) // groups)
    for tensor in followers:
        constraints.site(tensor, 0, channels)
    return along(channels, 1, call.shape)


@operator("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(call: LabelCall, constraints: Constraints) -> Value:
    """Over the last dims; exact only where all that is normalised together stays together."""
    labels = constraints.labels_of(call.args[0])
    dims = range(labels.dim() - len(call.args[1]), labels.dim())
    mixed = constraints.mix(labels, dims, f"{call.site} normalises over channels")
    result = labels if mixed is None else mixed
    return result if call.name != "native_layer_norm" else [result, None, None]
