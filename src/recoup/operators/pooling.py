"""Windows over positions: pooling and resampling keep the channel, whatever they do to the positions."""

from __future__ import annotations

import math

from recoup.labels.arrays import along, collapse
from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value, lock_operands, spread_over
from recoup.operators.differential import linear_in_first
from recoup.operators.record import operator

_SPATIAL = {
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("max_pool", "avg_pool", "adaptive_avg_pool")},
    **{f"adaptive_max_pool{n}d": n for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": n for n in (1, 2, 3)},
    "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3, "mkldnn_max_pool2d": 2,
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "_upsample_nearest_exact2d": 2,
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3, "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2,
}  # fmt: skip
_AVERAGES = frozenset(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("avg_pool", "adaptive_avg_pool"))


def window(call: LabelCall, constraints: Constraints) -> Value:
    """Labels do not change along the positions; the result has other positions and the same channels."""
    labels = constraints.labels_of(call.args[0])
    dims = list(range(labels.dim() - _SPATIAL[call.name], labels.dim()))
    mixed = constraints.mix(labels, dims, f"{call.site} runs over channels")
    if mixed is None:
        return lock_operands(call, constraints, f"{call.site} runs over channels")
    return spread_over(collapse(mixed, dims, keepdim=True), call.shape)


operator(*(name for name in _SPATIAL if name in _AVERAGES), is_pooling=True, differential=linear_in_first)(window)
operator(*(name for name in _SPATIAL if name not in _AVERAGES), is_pooling=True)(window)


@operator("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def resample(call: LabelCall, constraints: Constraints) -> Value:
    """Reads each channel at places that a second tensor gives."""
    labels, grid = constraints.labels_of(call.args[0]), constraints.labels_of(call.args[1])
    constraints.lock(grid, f"{call.site} takes it for places")
    dims = list(range(2, labels.dim()))
    mixed = constraints.mix(labels, dims, f"{call.site} runs over channels")
    if mixed is None:
        return lock_operands(call, constraints, f"{call.site} runs over channels")
    return collapse(mixed, dims, keepdim=True).expand(call.shape)


@operator("im2col")
def unfold(call: LabelCall, constraints: Constraints) -> Value:
    """The patches of every channel, one beside the other."""
    labels, kernel = constraints.labels_of(call.args[0]), math.prod(call.args[1])
    channels = constraints.channels_along(labels, labels.dim() - 3, call.site)
    return along(channels.repeat_interleave(kernel), len(call.shape) - 2, call.shape)


@operator("col2im")
def fold(call: LabelCall, constraints: Constraints) -> Value:
    """The inverse: all places of a patch belong to one channel."""
    labels, kernel = constraints.labels_of(call.args[0]), math.prod(call.args[2])
    places = constraints.channels_along(labels, labels.dim() - 2, call.site)
    channels = constraints.tie(places.view(-1, kernel), f"{call.site} meets a tensor of fixed size")
    return along(channels, len(call.shape) - 3, call.shape)
