"""Layer-wise optimal brain surgeon: what the loss of a channel costs in the whole network, all channels at once.

    H    covariance of a layer's inputs, with ridge     (d, d)
    W    its weight                                     (d, N)
    J    rows of one channel

    score_c = Σ over layers of tr(W_J^T (H^-1_JJ)^-1 W_J), relative to the variance of the layer's output

Dong et al., "Learning to prune deep neural networks via layer-wise optimal brain surgeon" (arXiv 1705.07565), for
channels instead of weights. H^-1 is that of the whole layer: `backward` uses the same score and updates it
after every channel.

Slow twin: `costs_of_single_channels` in tests/oracles.py.
"""

from __future__ import annotations

import torch

from recoup.algebra.selection.greedy import prepare_backward
from recoup.algebra.selection.problem import Problem, Ranking, by_score


def obs(problem: Problem) -> Ranking:
    """The channel that costs most when it alone is lost and compensated first."""
    costs = torch.zeros(problem.width, dtype=torch.float64, device=problem.device)
    for layer in problem.layers:
        elimination, scale = prepare_backward(layer, problem)
        costs += (elimination.scores() / scale).nan_to_num(0.0)
    return by_score(problem, costs)
