"""HRank: a channel whose feature maps have a high rank carries more information.

    A_cn    feature map of channel c in sample n, as a matrix     (h, w)

    score_c = mean of rank(A_cn) over samples, and over all maps of the channel that layers read

Lin et al., "HRank: filter pruning using high-rank feature map" (arXiv 2002.10179). A map of several dims is a matrix of
its first dim against the others; one with a single dim or none has rank 1, or 0 if it is zero. A layer that reads a
channel at several places, or is called several times, reads several maps, each with a rank of its own. Where ranks are
equal, as behind global pooling, the larger root mean square goes first: ours, the paper says nothing of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recoup.algebra.selection.problem import Problem, Ranking

# Samples whose maps are looked at. The paper's point is that the mean rank hardly depends on how many there are.
SAMPLES = 64
# Values in the matrices that are decomposed at once.
CHUNK = 1 << 22


def hrank(problem: Problem) -> Ranking:
    """Highest mean rank first."""
    maps = problem.evidence_for("hrank", "the feature maps that layers read").single_maps()
    is_read = torch.cat([each.is_read for each in maps], dim=1)
    ranks = _mean_where(is_read, [_ranks_of(each.values[:SAMPLES]) for each in maps])
    sizes = _mean_where(is_read, [_mean_squares(each.values[:SAMPLES]) for each in maps])
    by_size = sizes.argsort(descending=True, stable=True)
    score = torch.where(problem.free, ranks, torch.inf)[by_size]
    return Ranking(by_size[score.argsort(descending=True, stable=True)])


def _mean_where(is_read: Tensor, values: list[Tensor]) -> Tensor:
    """The mean (width,) of values (width, m) of every call over the maps that are read."""
    return (torch.cat(values, dim=1) * is_read).sum(dim=1) / is_read.sum(dim=1).clamp(min=1)


def _ranks_of(maps: Tensor) -> Tensor:
    """The mean ranks (width, m) of maps (n, width, m, *positions)."""
    return mean_ranks(maps.flatten(1, 2)).reshape(maps.shape[1:3])


def _mean_squares(maps: Tensor) -> Tensor:
    """The mean square (width, m) of maps (n, width, m, *positions)."""
    return maps.double().square().movedim(0, 2).flatten(2).mean(dim=2)


def mean_ranks(maps: Tensor) -> Tensor:
    """The mean rank of the maps (n, width, *positions) of every channel (width,)."""
    matrices = maps.reshape(*maps.shape[:2], maps.shape[2] if maps.dim() > 3 else 1, -1)
    step = max(1, CHUNK // max(1, matrices[0].numel()))
    return torch.cat([_ranks(part) for part in matrices.split(step)]).mean(dim=0)


def _ranks(matrices: Tensor) -> Tensor:
    """Ranks (n, width): singular values above rounding, from the smaller Gram matrix in twice the precision.

    A GPU decomposes many small symmetric matrices at once, and general ones one after the other.
    """
    rows, columns = matrices.shape[-2:]
    tall = (matrices if rows <= columns else matrices.mT).double()
    # Half precision rounds a matrix by at most eps · |A|_F, which is at most eps · √min(h, w) times its largest value.
    rounding = math.sqrt(min(rows, columns)) * torch.finfo(matrices.dtype).eps
    tolerance = max(max(rows, columns) * torch.finfo(torch.float32).eps, rounding)
    peak = tall.flatten(2).abs().amax(dim=2).clamp(min=torch.finfo(torch.float64).tiny)[..., None, None]
    values = torch.linalg.eigvalsh((tall / peak) @ (tall / peak).mT)
    is_above: Tensor = values > tolerance**2 * values[..., -1:].clamp(min=torch.finfo(torch.float64).eps)
    return is_above.double().sum(dim=-1)
