"""Spreading: operations that put copies or constants beside what is there, in a number the code fixes.

What they put there belongs to no layer, but it can go where the channels it meets go: it gets labels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from recoup.labels.arrays import FIXED, NONE, compress, core, varies
from recoup.labels.constraints import Constraints
from recoup.operators.call import LabelCall, Value, lock_operands, unlabelled
from recoup.operators.differential import Differential, RecordedCall, linear_in_first
from recoup.operators.record import operator
from recoup.operators.resizing import CallArguments, Remaining, size_at, with_argument

# Copies that get labels one by one; a larger map is taken to be of fixed size.
MOST_COPIES = 1 << 20


def expand(call: LabelCall, constraints: Constraints) -> Value:
    """Copies of a value that has no channel yet may each belong to one."""
    labels = constraints.labels_of(call.args[0])
    behind = len(call.shape) - labels.dim()
    wide = labels.expand(call.shape)
    stretched = [d for d, n in enumerate(call.shape) if n > 1 and (d < behind or labels.shape[d - behind] == 1)]
    (small,) = core(labels)
    if not stretched or bool((small >= 0).any()):
        return wide
    copies = _copies(call.shape, stretched, constraints)
    return wide if copies is None else copies


operator("expand", is_movement=True, resize=size_at(1), differential=linear_in_first)(expand)
operator("broadcast_to", resize=size_at(1))(expand)


def fill(call: LabelCall, constraints: Constraints) -> Value:
    """A constant of any size."""
    copies = _copies(call.shape, range(len(call.shape)), constraints, follows=call.follows)
    return unlabelled(call.shape, FIXED) if copies is None else copies


operator("full", "zeros", "ones", "empty", resize=size_at(0))(fill)
operator("new_zeros", "new_ones", "new_full", "new_empty", resize=size_at(1))(fill)


def _amounts(node: fx.Node, remaining: Remaining) -> CallArguments:
    """As much beside the channels as remains of what was put there."""
    layout, amounts = remaining.layout(node), list(node.args[1])  # type: ignore[arg-type]  # a list of amounts
    kept = remaining.kept(layout)
    place = 2 * (len(layout.shape) - 1 - (layout.dim or 0))
    if kept is not None and place < len(amounts):
        before, after = amounts[place : place + 2]
        amounts[place] = int((kept < before).sum())
        amounts[place + 1] = int((kept >= layout.shape[layout.dim] - after).sum())
    return with_argument(node, 1, "pad", amounts)


def _padded(call: RecordedCall) -> Differential | None:
    """With a constant around: it does not move."""
    target, (_, amounts, *mode) = call.target, call.operands
    if call.names or mode[:1] not in ([], ["constant"]):
        return None
    return lambda moves: target(moves[0], amounts)


def pad(call: LabelCall, constraints: Constraints) -> Value:
    """A border around positions belongs to its channel; constants beside channels get labels of their own."""
    labels, amounts = compress(constraints.labels_of(call.args[0])), call.args[1]
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
            labels = _beside(labels, dim, before, after, constraints)
        else:
            return lock_operands(call, constraints, f"{call.site} cuts or repeats channels")
    return labels


operator("pad", resize=_amounts, differential=_padded)(pad)
operator("constant_pad_nd", resize=_amounts)(pad)


def _beside(labels: Tensor, dim: int, before: int, after: int, constraints: Constraints) -> Tensor:
    """Fresh labels on both sides along `dim`."""
    parts = [labels]
    for amount, place in ((before, 0), (after, len(parts) + 1)):
        if amount > 0:
            shape = [1] * labels.dim()
            shape[dim] = amount
            size = [amount if d == dim else n for d, n in enumerate(labels.shape)]
            beside = torch.full((amount,), FIXED) if constraints.sizes_stay else constraints.fresh(amount)
            parts.insert(place, beside.view(shape).expand(size))
    return torch.cat(parts, dim)


def _copies(
    shape: Sequence[int], dims: Sequence[int], constraints: Constraints, *, follows: bool = False
) -> Tensor | None:
    sizes = [shape[dim] for dim in dims]
    if constraints.sizes_stay and not follows:
        return None
    if not 1 < math.prod(sizes) <= MOST_COPIES:
        return torch.full((), NONE).expand(tuple(shape)) if math.prod(sizes) == 1 else None
    view = [n if dim in dims else 1 for dim, n in enumerate(shape)]
    return constraints.fresh(math.prod(sizes)).view(view).expand(tuple(shape))
