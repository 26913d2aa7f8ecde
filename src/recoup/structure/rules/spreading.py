"""Spreading: operations that put copies or constants beside what is there, in a number the code fixes.

What they put there belongs to no layer, but it can go where the channels it meets go: it gets labels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recoup.structure.labels import FIXED, NONE, compress, core, varies
from recoup.structure.ledger import Ledger
from recoup.structure.rules.table import Call, Value, lock_operands, rule, unlabelled

# Copies that get labels one by one; a larger map is taken to be of fixed size.
MOST_COPIES = 1 << 20


@rule("expand", "broadcast_to")
def expand(call: Call, ledger: Ledger) -> Value:
    """Copies of a value that has no channel yet may each belong to one."""
    labels = ledger.labels_of(call.args[0])
    behind = len(call.shape) - labels.dim()
    wide = labels.expand(call.shape)
    stretched = [d for d, n in enumerate(call.shape) if n > 1 and (d < behind or labels.shape[d - behind] == 1)]
    (small,) = core(labels)
    if not stretched or bool((small >= 0).any()):
        return wide
    copies = _copies(call.shape, stretched, ledger)
    return wide if copies is None or _is_sized(labels) else copies


@rule("full", "zeros", "ones", "new_zeros", "new_ones", "new_full", "empty", "new_empty")
def fill(call: Call, ledger: Ledger) -> Value:
    """A constant of any size."""
    copies = _copies(call.shape, range(len(call.shape)), ledger)
    return unlabelled(call.shape, FIXED) if copies is None else copies


@rule("pad", "constant_pad_nd")
def pad(call: Call, ledger: Ledger) -> Value:
    """A border around positions belongs to its channel; constants beside channels get labels of their own."""
    labels, amounts = compress(ledger.labels_of(call.args[0])), call.args[1]
    plain = call.name == "constant_pad_nd" or call.argument(2, "mode", "constant") == "constant"
    for i in range(len(amounts) // 2):
        dim, before, after = labels.dim() - 1 - i, amounts[2 * i], amounts[2 * i + 1]
        if not before and not after:
            continue
        if not varies(labels, dim):
            size = list(labels.shape)
            size[dim] += before + after
            labels = labels.narrow(dim, 0, 1).expand(size)
        elif plain and min(before, after) >= 0:
            labels = _beside(labels, dim, before, after, ledger)
        else:
            return lock_operands(call, ledger, f"{call.site} cuts or repeats channels")
    return labels


def _beside(labels: Tensor, dim: int, before: int, after: int, ledger: Ledger) -> Tensor:
    """Fresh labels on both sides along `dim`."""
    parts = [labels]
    for amount, place in ((before, 0), (after, len(parts) + 1)):
        if amount > 0:
            shape = [1] * labels.dim()
            shape[dim] = amount
            size = [amount if d == dim else n for d, n in enumerate(labels.shape)]
            beside = torch.full((amount,), FIXED) if ledger.sizes_stay else ledger.fresh(amount)
            parts.insert(place, beside.view(shape).expand(size))
    return torch.cat(parts, dim)


def _copies(shape: Sequence[int], dims: Sequence[int], ledger: Ledger) -> Tensor | None:
    sizes = [shape[dim] for dim in dims]
    if ledger.sizes_stay:
        return None
    if not 1 < math.prod(sizes) <= MOST_COPIES:
        return torch.full((), NONE).expand(tuple(shape)) if math.prod(sizes) == 1 else None
    view = [n if dim in dims else 1 for dim, n in enumerate(shape)]
    return ledger.fresh(math.prod(sizes)).view(view).expand(tuple(shape))


def _is_sized(labels: Tensor) -> bool:
    """Whether some of it is of fixed size along another dim."""
    return labels.numel() > 1
