"""How the contributions of channels to what their readers compute add up: the matrix that ThiNet and LASSO look at.

    a_c      rows of a layer's patch that belong to channel c
    w_nc     weights of output n for these rows; w_nc^T a_c is the channel's contribution to that output

    M_cc' = Σ_n w_nc^T E[a_c a_c'^T] w_nc'      so that E Σ_n (Σ_c β_c w_nc^T a_c)² = β^T M β

Of several layers, each is measured by tr M, the second moments of all contributions, or by its `scale` if it has one,
and their matrices add up. The second moment of the whole output, the sum of M, would not do: contributions may cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection.problem import Layer, Problem


def contributions(problem: Problem) -> Tensor:
    """M (width, width) of all layers together; of a single one as it is."""
    every = [(layer, _of_layer(layer, problem.width)) for layer in problem.readers]
    if len(every) == 1:
        return every[0][1]
    return torch.stack([M / _size(layer, M) for layer, M in every]).sum(dim=0)


def _size(layer: Layer, M: Tensor) -> Tensor:
    size = M.trace() if layer.scale is None else M.new_tensor(layer.scale)
    return size.clamp(min=torch.finfo(torch.float64).tiny)


def _of_layer(layer: Layer, width: int) -> Tensor:
    W, among = layer.weight.double(), layer.by_channel(width)
    return among.T @ (layer.second_moments * (W @ W.T)) @ among
