"""Normalisations: those of single channels follow them, those of several tie or hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from recoup.labels.arrays import along, core, varying_dims
from recoup.labels.constraints import Constraints, Norm, TensorRef
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import Differential, RecordedCall
from recoup.operators.names import argument, operation_name
from recoup.operators.record import operator
from recoup.operators.resizing import CallArguments, Remaining, groups_at, unchanged, with_argument

# Where the epsilon stands among the arguments, and what it is if it does not stand there.
_EPS: dict[str, tuple[int, float | None]] = {"layer_norm": (4, 1e-5), "rms_norm": (3, None)}


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


def _refresh_normalised(module: Any, _: Tensor | None) -> None:
    """Fewer channels; over n in the place of m the mean of the squares is m / n times as large, and so is epsilon."""
    if module.weight is None or tuple(module.weight.shape) == tuple(module.normalized_shape):
        return
    before, after = module.normalized_shape[-1], module.weight.shape[-1]
    module.normalized_shape = tuple(module.weight.shape)
    module.eps = None if module.eps is None else module.eps * before / after


def _fewer(node: fx.Node, remaining: Remaining) -> CallArguments:
    """The same for a call in a graph."""
    name, source = operation_name(node.target), argument(node, 0, "input")
    before, after = remaining.layout(source).shape[-1], remaining.shape(source)[-1]
    if before == after or name not in _EPS:
        return unchanged(node, remaining)
    place, default = _EPS[name]
    eps = argument(node, place, "eps", default)
    call = with_argument(node, 1, "normalized_shape", [after])
    if eps is None:
        return call
    args = [*call.args, *[None] * (place - len(call.args))]
    return CallArguments(call.target, (*args[:place], eps * before / after, *args[place + 1 :]), call.kwargs)


@operator(
    "layer_norm",
    "rms_norm",
    "native_layer_norm",
    resize=_fewer,
    modules={nn.LayerNorm: _refresh_normalised, nn.RMSNorm: _refresh_normalised},
)
def layer_norm(call: LabelCall, constraints: Constraints) -> Value:
    """Over the last dims; exact where all that is normalised together stays, or the statistics can be put right."""
    labels = constraints.labels_of(call.args[0])
    dims = range(labels.dim() - len(call.args[1]), labels.dim())
    if constraints.frees_norms and call.name in _EPS and len(dims) == 1 and _is_of_channels(labels, constraints):
        return _over_channels(call, labels, constraints)
    mixed = constraints.mix(labels, dims, f"{call.site} normalises over channels")
    result = labels if mixed is None else mixed
    return result if call.name != "native_layer_norm" else [result, None, None]


def _is_of_channels(labels: Tensor, constraints: Constraints) -> bool:
    """Whether all that is normalised together are channels, one for each index of the last dim.

    Along another dim some may be told apart so far, such as a class token beside patches; heads all differ.
    """
    (small,) = core(labels)
    last = labels.dim() - 1
    if bool((small < 0).any()) or last not in varying_dims(labels):
        return False
    others = [dim for dim in varying_dims(labels) if dim != last]
    if others:
        small = constraints.merged(small)
    return all(len(small.movedim(dim, 0).flatten(1).unique(dim=0)) < small.shape[dim] for dim in others)


def _over_channels(call: LabelCall, labels: Tensor, constraints: Constraints) -> Value:
    """What it reads may lose channels if it has a gain, by which the scale is put right."""
    dim = labels.dim() - 1
    gain = call.argument(2, "weight")
    bias = call.argument(3, "bias") if call.name == "layer_norm" else None
    if not isinstance(gain, TensorRef) or not (bias is None or isinstance(bias, TensorRef)):
        return lock_operands(call, constraints, f"{call.site} normalises over channels without a gain of its own")
    channels = constraints.channels_along(labels, dim, call.site)
    for tensor in (gain, bias):
        if tensor is not None:
            constraints.site(tensor, 0, channels)
    name = None if bias is None else bias.name
    constraints.norms.append(Norm(call.node, call.site, gain.name, name, channels, call.name == "layer_norm"))
    return along(channels, dim, call.shape)
