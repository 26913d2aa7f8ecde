"""Windows over positions: pooling and resampling keep the channel, whatever they do to the positions."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.structure.labels import collapse, varies
from recoup.structure.ledger import Ledger
from recoup.structure.rules.table import Call, Value, lock_operands, rule

_SPATIAL = {
    **{f"{kind}{n}d": n for n in (1, 2, 3) for kind in ("max_pool", "avg_pool", "adaptive_avg_pool")},
    **{f"adaptive_max_pool{n}d": n for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": n for n in (1, 2, 3)},
    "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3, "mkldnn_max_pool2d": 2,
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "_upsample_nearest_exact2d": 2,
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3, "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2,
}  # fmt: skip


@rule(*_SPATIAL)
def window(call: Call, ledger: Ledger) -> Value:
    """Labels do not change along the positions; the result has other positions and the same channels."""
    labels = ledger.labels_of(call.args[0])
    dims = range(labels.dim() - _SPATIAL[call.name], labels.dim())
    if any(varies(labels, dim) for dim in dims):
        return lock_operands(call, ledger, f"{call.site} runs over channels")
    one = collapse(labels, list(dims), keepdim=True)
    return _spread(one, call.shape)


def _spread(one: Tensor, shape: object) -> Value:
    if isinstance(shape, torch.Size):
        return one.expand(shape)
    assert isinstance(shape, (list, tuple))
    return [_spread(one, part) for part in shape]
