"""ThiNet: remove, one after the other, the channels whose summed contributions matter least.

    M    second moments of contributions     (C, C), see `contributions`
    T    channels removed so far

    next = argmin_c  Σ_{i, j in T + c} M_ij = const + 2 Σ_{t in T} M_ct + M_cc

Luo et al., "ThiNet: a filter level pruning method for deep neural network compression" (arXiv 1707.06342), algorithm 1.
They sum over sampled rows; the sums depend on the rows through M alone.

Slow twin: `thinet_from_rows` in tests/oracles.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection.contributions import contributions
from recoup.algebra.selection.problem import Problem, Ranking


def thinet(problem: Problem) -> Ranking:
    """The channel that is removed last first."""
    free, staying = problem.free.nonzero().squeeze(1), (~problem.free).nonzero().squeeze(1)
    removed = _removal_order(contributions(problem)[free][:, free])
    return Ranking(torch.cat([staying, free[removed].flip(0)]))


def _removal_order(M: Tensor) -> Tensor:
    """Channels in the order in which they are removed; nothing waits for the device."""
    count = len(M)
    order = torch.zeros(count, dtype=torch.long, device=M.device)
    cost = M.diagonal().clone()
    for step in range(count):
        channel = cost.argmin(dim=0, keepdim=True)
        order[step : step + 1] = channel
        cost += 2 * M.index_select(1, channel).squeeze(1)
        cost.index_fill_(0, channel, torch.inf)
    return order
