"""Channel labels: for every element of an activation, the number of the channel it belongs to.

An activation of one sample gets an integer tensor of its own shape. Elements of one channel share a label >= 0;
NONE marks what belongs to no channel, FIXED what no choice can remove (the model's input, a constant of the code).
Labels repeat over positions, so they are kept as expanded views: a dim of stride 0 holds one value throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NONE = -1
FIXED = -2


def constant(shape: Sequence[int], value: int) -> Tensor:
    """Labels that are `value` everywhere."""
    return torch.tensor(value).expand(tuple(shape))


def along(labels: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Labels (n,) laid along `dim` of `shape`, the same at every other index."""
    view = [1] * len(shape)
    view[dim] = -1
    return labels.view(view).expand(tuple(shape))


def varies(labels: Tensor, dim: int) -> bool:
    """Whether the labels change along `dim`."""
    if labels.shape[dim] <= 1 or labels.stride(dim) == 0 or not labels.numel():
        return False
    (small,) = core(labels)
    ends = small.movedim(dim, -1)[(0,) * (small.dim() - 1)]
    if int(ends[0]) != int(ends[-1]):  # mostly enough, and far cheaper than to look at all
        return True
    return not bool((small == small.narrow(dim, 0, 1)).all())


def compress(labels: Tensor) -> Tensor:
    """The same labels, with stride 0 along every dim they do not change along."""
    for dim in range(labels.dim()):
        if labels.shape[dim] > 1 and labels.stride(dim) != 0 and not varies(labels, dim):
            labels = labels.narrow(dim, 0, 1).expand(labels.shape)
    return labels


def core(*labels: Tensor) -> list[Tensor]:
    """Labels of one common shape, cut to length 1 along every dim that none of them changes along."""
    cut = list(labels)
    for dim in range(labels[0].dim()):
        if all(tensor.shape[dim] > 0 and tensor.stride(dim) == 0 for tensor in cut):
            cut = [tensor.narrow(dim, 0, 1) for tensor in cut]
    return cut


def replaced(labels: Tensor, old: int, new: int) -> Tensor:
    """Labels with one value in the place of another."""
    (small,) = core(labels)
    return torch.where(small == old, new, small).expand(labels.shape)


def collapse(labels: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Labels after a reduction over dims they do not change along."""
    for dim in dims:
        labels = labels.narrow(dim, 0, 1)
    return labels if keepdim else labels.squeeze(tuple(dims))


def varying_dims(labels: Tensor) -> list[int]:
    """Dims along which the labels change."""
    return [dim for dim in range(labels.dim()) if varies(labels, dim)]


def components(count: int, edges: Tensor) -> Tensor:
    """For nodes 0..count-1 joined by `edges` (2, m), the smallest node of each one's component (count,)."""
    root = torch.arange(count)
    while edges.numel():
        left, right = root[edges[0]], root[edges[1]]
        low = torch.minimum(left, right)
        lower = root.scatter_reduce(0, left, low, "amin").scatter_reduce(0, right, low, "amin")
        while not torch.equal(lower, lower[lower]):
            lower = lower[lower]
        if torch.equal(lower, root):
            break
        root = lower
    return root
