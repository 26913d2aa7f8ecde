"""A prior for a covariance of which too few rows are known: positions of one channel share what they know.

    d = m · p     inputs: m channels at p positions each, channel-major (a flattened map)
    G             covariance of the inputs as it was seen (d, d)
    D             its diagonal;   R (m, m) the correlation of channels at one position, averaged over positions
    G_0           D^½ (R ⊗ I_p) D^½: positions have nothing to do with each other, channels the same everywhere
    G_s         = (1 - s) G + s G_0

With fewer rows than inputs, G can explain any input by the others, and so tells nothing about which channel can go. A
channel that is an exact copy of another one is that in G_0 too, and so in every G_s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recoup.algebra.moments import Moments
from recoup.algebra.ridge import compensate

# Strengths s that held-out rows choose from.
STRENGTHS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)


def shrink(moments: Moments, positions: int, strength: float) -> Moments:
    """The moments with the scatter of G_s."""
    if strength == 0.0:
        return moments
    scatter = (1 - strength) * moments.scatter + strength * shared_scatter(moments.scatter, positions)
    return replace(moments, scatter=scatter)


def shared_scatter(scatter: Tensor, positions: int) -> Tensor:
    """G_0 for G, or for a multiple of it."""
    size = scatter.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(size > 0, 1 / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0)
    correlation = (scatter * inverse[:, None] * inverse).unflatten(0, (-1, positions)).unflatten(2, (-1, positions))
    shared = correlation.diagonal(dim1=1, dim2=3).mean(dim=-1)  # (m, m)
    spread = torch.kron(shared, torch.eye(positions, dtype=shared.dtype, device=shared.device))
    # Positions where a channel never varies lower the mean; every input keeps the variance that was seen.
    spread.diagonal().fill_(1.0)
    return spread * size[:, None] * size


def choose_strength(
    moments: Moments,
    held: Moments,
    weight: Tensor,
    positions: int,
    ridge: float,
    strengths: Sequence[float] = STRENGTHS,
) -> float:
    """The strength with which half of the channels, refitted, miss the least of the output y = W^T a on held-out rows.

    `weight` W is (d, N).
    """
    channels = len(moments.mean) // positions
    half = torch.randperm(channels, generator=torch.Generator().manual_seed(0)) % 2 == 0
    keep = half.to(weight.device).repeat_interleave(positions)
    errors = []
    for strength in strengths:
        fitted = compensate(shrink(moments, positions, strength).covariance, weight, keep, ridge=ridge).weight
        lost = weight - fitted
        errors.append(float((lost * (held.covariance @ lost)).sum()))
    return strengths[errors.index(min(errors))]
