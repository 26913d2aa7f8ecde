"""FPGM: filters near the geometric median of their group can be replaced by the others.

    w_c     weights that make channel c     (f,), those of all producers side by side

    score_c = Σ_c' ||w_c - w_c'||

He et al., "Filter pruning via geometric median for deep convolutional neural networks acceleration" (arXiv 1811.00250):
the filter with the smallest sum of distances is the nearest to the median, and goes first.
"""

from __future__ import annotations

import torch

from recoup.algebra.selection.problem import Problem, Ranking, by_score


def fpgm(problem: Problem) -> Ranking:
    """Largest sum of distances to the other filters first."""
    filters = problem.require_filters(problem.filters, "fpgm").double()
    # The quick form, by a product, loses the small distances between filters that are nearly the same.
    distances = torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist")
    return by_score(problem, distances.sum(dim=1))
