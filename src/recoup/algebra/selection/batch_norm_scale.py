"""Network slimming: the factor that a batch norm gives to a channel says what it is worth.

    γ_c    factors of channel c in the batch norms that it passes     (m,)

    score_c = Σ |γ_c|

Liu et al., "Learning efficient convolutional networks through network slimming" (arXiv 1708.06519). They train with a
penalty on γ first; here γ is taken as it is.
"""

from __future__ import annotations

from recoup.algebra.selection.problem import Problem, Ranking, by_score
from recoup.errors import UsageError

NAME = "bn-scale"


def bn_scale(problem: Problem) -> Ranking:
    """Largest factor in the batch norm first."""
    scales = problem.evidence_for(NAME, "the factors of batch norms").scales().double()
    if not scales.shape[1]:
        raise UsageError(
            f"{NAME} looks at the factors of batch norms, and these channels pass none. Leave the group out (exclude=, "
            "--exclude), or choose a selector that needs no batch norm, such as 'l2' or 'backward'."
        )
    return by_score(problem, scales.abs().sum(dim=1))
