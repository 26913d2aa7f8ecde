"""Points that lie together: k-means, small and deterministic.

    X   points (N, n)
    K   at most so many clusters

The first centre is drawn by the seed, every further one is the point farthest from those there are. Points that fall
on K or fewer places are told apart exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rounds of moving the centres; clusters of slopes settle within a few.
ROUNDS = 20
# Points nearer to each other than this share of the largest one's squared length are one: rounding of float32 products.
SAME = 1e-10


def clusters(points: Tensor, most: int, seed: int = 0) -> Tensor:
    """The cluster of every point (N,), numbered from 0 without a gap; every point has its own where N <= `most`."""
    if len(points) <= most:
        return torch.arange(len(points), device=points.device)
    points = points.double()
    centres = _spread(points, most, seed)
    nearest = _nearest(points, centres)
    for _ in range(ROUNDS):
        centres = _means(points, nearest, centres)
        nearest = _nearest(points, centres)
    _, numbered = torch.unique(nearest, return_inverse=True)
    place: Tensor = numbered
    return place


def _spread(points: Tensor, most: int, seed: int) -> Tensor:
    """Up to `most` points that lie far from each other."""
    first = int(torch.randint(len(points), (1,), generator=torch.Generator().manual_seed(seed)))
    chosen = [first]
    distance = (points - points[first]).square().sum(dim=1)
    least = SAME * float(points.square().sum(dim=1).max())
    while len(chosen) < most and float(distance.max()) > least:
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (points - points[chosen[-1]]).square().sum(dim=1))
    return points[chosen]


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    """|x|² is the same for every centre: what is left of |x - c|² tells."""
    return (centres.square().sum(dim=1) - 2 * points @ centres.T).argmin(dim=1)


def _means(points: Tensor, nearest: Tensor, centres: Tensor) -> Tensor:
    """The mean of every cluster; one that lost all its points stays where it was."""
    counts = torch.bincount(nearest, minlength=len(centres))[:, None]
    sums = torch.zeros_like(centres).index_add_(0, nearest, points)
    return torch.where(counts > 0, sums / counts.clamp(min=1), centres)
