"""Importance estimation: what the loss of a sample would change by, to first order, without a channel.

    a_rcnp    what layer r reads of channel c, in sample n at position p
    L_n       loss of sample n

    score_c = Σ_n (Σ_r Σ_p a_rcnp ∂L_n/∂a_rcnp)²

Molchanov et al., "Importance estimation for neural network pruning" (arXiv 1906.10771), the gate of a channel: it
scales all that is read of the channel, whichever layer does.
"""

from __future__ import annotations

import torch

from recoup.algebra.selection.problem import Problem, Ranking, by_score


def taylor(problem: Problem) -> Ranking:
    """Largest squared first-order change of the loss first."""
    evidence = problem.evidence_for("taylor", "feature maps and the gradients of a loss")
    pairs = zip(evidence.gradients(), evidence.maps(), strict=True)
    terms = [(g.double() * a.double()).flatten(2).sum(dim=2) if a.dim() > 2 else g.double() * a for g, a in pairs]
    return by_score(problem, torch.stack(terms).sum(dim=0).square().sum(dim=0))
