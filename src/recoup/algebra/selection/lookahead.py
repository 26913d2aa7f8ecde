"""Lookahead: a channel is worth what makes it times what reads it.

    m_c    weights that make channel c, times the factor of the batch norm behind them     (f,)
    r_c    weights that read channel c, of all layers that do

    score_c = ||m_c|| · ||r_c||

Park et al., "Lookahead: a far-sighted alternative of magnitude-based pruning" (arXiv 2002.04809), score a single weight
by its size times the norms of its neighbours; summed over all paths through a channel, squared, that is the product
of the two norms. Factors of batch norms belong to the path, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection.problem import Problem, Ranking, by_score


def lookahead(problem: Problem) -> Ranking:
    """Largest product of what makes a channel and what reads it first; without evidence no batch norm is known."""
    makers = problem.filters if problem.evidence is None else problem.evidence.folded()
    makers = problem.require_filters(makers, "lookahead")
    return by_score(problem, makers.double().norm(dim=1) * _reading_norms(problem))


def _reading_norms(problem: Problem) -> Tensor:
    """||r_c|| of every channel (width,)."""
    squares = torch.zeros(problem.width, dtype=torch.float64, device=problem.device)
    for layer in problem.readers:
        squares += layer.weight.double().square().sum(dim=1) @ layer.by_channel(problem.width)
    return squares.sqrt()
