"""APoZ: a channel that is mostly zero says little.

    a_cnp    what the layers read of channel c, in sample n at position p

    score_c = 1 - share of zeros among the a_cnp, over all layers that read the channel

Hu et al., "Network trimming: a data-driven neuron pruning approach towards efficient deep architectures" (arXiv
1607.03250). What counts is what the readers see, behind activation and pooling.
"""

from __future__ import annotations

import torch

from recoup.algebra.selection.problem import Problem, Ranking, by_score


def apoz(problem: Problem) -> Ranking:
    """Fewest zeros first."""
    maps = problem.evidence_for("apoz", "the feature maps that layers read").single_maps()
    active, seen = torch.zeros(2, problem.width, dtype=torch.float64, device=problem.device)
    for each in maps:
        by_map = (each.values != 0).movedim(0, 2).flatten(2)  # (width, m, values)
        active += (by_map.sum(dim=2) * each.is_read).sum(dim=1)
        seen += each.is_read.sum(dim=1) * by_map.shape[2]
    return by_score(problem, active / seen.clamp(min=1))
