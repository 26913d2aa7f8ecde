"""How the contributions of channels to what their readers compute add up: the matrix that ThiNet and LASSO look at.

    a_c      rows of a layer's patch that belong to channel c
    w_nc     weights of output n for these rows; w_nc^T a_c is the channel's contribution to that output

    M_cc' = Σ_n w_nc^T E[a_c a_c'^T] w_nc'      so that E Σ_n (Σ_c β_c w_nc^T a_c)² = β^T M β

Of several layers, each is measured by the second moment of the whole output of the group, and their matrices add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection.problem import Layer, Problem


def contributions(problem: Problem) -> Tensor:
    """M (width, width) of all layers together."""
    total = torch.zeros(problem.width, problem.width, dtype=torch.float64, device=problem.device)
    for layer in problem.layers:
        M = _of_layer(layer, problem.width)
        whole = M.sum()
        total += torch.where(whole > 0, M / whole.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return total


def _of_layer(layer: Layer, width: int) -> Tensor:
    inside = (layer.channel_of >= 0).nonzero().squeeze(1)
    W, channel_of = layer.weight[inside].double(), layer.channel_of[inside]
    by_row = layer.second_moments[inside][:, inside] * (W @ W.T)
    columns = by_row.new_zeros(len(inside), width).index_add_(1, channel_of, by_row)
    return columns.new_zeros(width, width).index_add_(0, channel_of, columns)
