"""NISP and SynFlow: what passes a channel in the network of absolute weights, without any data.

    |W|    absolute weights, factors of batch norms included; no biases, activations passed as they are; of an embedding
           the mean of its absolute rows
    R      sum of all outputs
    a, b   what a layer reads of a channel when the inputs are ones, and ∂R/∂a

    nisp:     score_c = Σ b_c         importance of the final responses, passed back by s_l = |W|^T s_(l+1)
    synflow:  score_c = Σ a_c b_c     the part of R that passes the channel

Sums run over positions and over the layers that read the channel. Yu et al., "NISP: pruning networks using neuron
importance score propagation" (arXiv 1711.05908): they weigh the final responses by a feature ranking, here all outputs
count alike. Tanaka et al., "Pruning neural networks without any data by iteratively conserving synaptic flow"
(arXiv 2006.05467): they prune in a hundred rounds, here the flow of the whole network ranks at once.
"""

from __future__ import annotations

from recoup.algebra.selection.problem import Problem, Ranking, by_score

_WHAT = "what passes the network of absolute weights"


def nisp(problem: Problem) -> Ranking:
    """Largest importance, passed back from the outputs, first."""
    return by_score(problem, problem.evidence_for("nisp", _WHAT).flow().importance.double())


def synflow(problem: Problem) -> Ranking:
    """Largest flow first."""
    return by_score(problem, problem.evidence_for("synflow", _WHAT).flow().through.double())
