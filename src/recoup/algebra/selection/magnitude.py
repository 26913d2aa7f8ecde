"""Selectors that look at weights alone or at nothing, to compare with."""

from __future__ import annotations

import torch

from recoup.algebra.selection.problem import Problem, Ranking


def l2(problem: Problem) -> Ranking:
    """Largest Euclidean norm of the producing weights first."""
    return _by_score(problem, problem.filters.double().norm(dim=1))


def random(problem: Problem) -> Ranking:
    """An order drawn from `problem.seed`."""
    generator = torch.Generator().manual_seed(problem.seed)
    return _by_score(problem, torch.rand(problem.width, generator=generator, dtype=torch.float64).to(problem.device))


def _by_score(problem: Problem, score: torch.Tensor) -> Ranking:
    return Ranking(torch.where(problem.free, score, torch.inf).argsort(descending=True, stable=True))
