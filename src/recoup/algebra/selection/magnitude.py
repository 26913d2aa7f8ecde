"""Selectors that look at weights alone or at nothing, to compare with.

    w_c   weights that make channel c     (f,)

    l1:  score_c = Σ |w_c|      l2:  score_c = (Σ w_c²)^½

Li et al., "Pruning filters for efficient ConvNets" (arXiv 1608.08710), compare both. All that makes a channel counts:
a channel of a residual stream has the filters of all its producers.
"""

from __future__ import annotations

from zlib import crc32

import torch

from recoup.algebra.selection.problem import Problem, Ranking, by_score


def l1(problem: Problem) -> Ranking:
    """Largest sum of absolute producing weights first."""
    return by_score(problem, problem.require_filters(problem.filters, "l1").double().abs().sum(dim=1))


def l2(problem: Problem) -> Ranking:
    """Largest Euclidean norm of the producing weights first."""
    return by_score(problem, problem.require_filters(problem.filters, "l2").double().norm(dim=1))


def random(problem: Problem) -> Ranking:
    """An order drawn from `problem.seed` and the name of the group, so that no two groups lose the same places."""
    generator = torch.Generator().manual_seed(problem.seed + crc32(problem.name.encode()))
    return by_score(problem, torch.rand(problem.width, generator=generator, dtype=torch.float64).to(problem.device))
