"""HRank: a channel whose feature maps have a high rank carries more information.

    A_cn    feature map of channel c in sample n, as a matrix     (h, w)

    score_c = mean over samples, and over the layers that read the channel, of rank(A_cn)

Lin et al., "HRank: filter pruning using high-rank feature map" (arXiv 2002.10179). A map of several dims is a matrix of
its first dim against the others; one with a single dim or none has rank 1, or 0 if it is zero. Where ranks are equal,
as behind global pooling, the larger root mean square goes first: ours, the paper says nothing of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection.problem import Problem, Ranking

# Samples whose maps are looked at. The paper's point is that the mean rank hardly depends on how many there are.
SAMPLES = 64
# Values in the matrices that are decomposed at once.
CHUNK = 1 << 22


def hrank(problem: Problem) -> Ranking:
    """Highest mean rank first."""
    maps = [each[:SAMPLES] for each in problem.evidence_for("hrank", "the feature maps that layers read").maps()]
    reads = torch.stack([layer.reads(problem.width) for layer in problem.layers])
    readers = reads.sum(dim=0).clamp(min=1)
    ranks = torch.stack([mean_ranks(each) for each in maps]).sum(dim=0) / readers
    sizes = torch.stack([each.double().square().transpose(0, 1).flatten(1).mean(dim=1) for each in maps]).sum(dim=0)
    by_size = sizes.argsort(descending=True, stable=True)
    score = torch.where(problem.free, ranks, torch.inf)[by_size]
    return Ranking(by_size[score.argsort(descending=True, stable=True)])


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
    tolerance = max(rows, columns) * torch.finfo(torch.float32).eps
    peak = tall.flatten(2).abs().amax(dim=2).clamp(min=torch.finfo(torch.float64).tiny)[..., None, None]
    values = torch.linalg.eigvalsh((tall / peak) @ (tall / peak).mT)
    is_above: Tensor = values > tolerance**2 * values[..., -1:].clamp(min=torch.finfo(torch.float64).eps)
    return is_above.double().sum(dim=-1)
