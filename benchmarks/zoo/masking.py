"""The masked original: the network at full size that a smaller one must agree with, given the inputs its layers lost.

A normalisation over channels is made to see the kept ones only, which is what it sees in the smaller network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

Norm = (nn.LayerNorm, nn.GroupNorm)


def inputs_of(module: nn.Module) -> int:
    """How many input channels a layer has."""
    for attribute in ("in_features", "in_channels", "num_channels", "embed_dim", "input_size"):
        if hasattr(module, attribute):
            return int(getattr(module, attribute))
    assert isinstance(module, nn.LayerNorm)
    return int(module.normalized_shape[-1])


@torch.no_grad()
def masked(original: nn.Module, smaller: nn.Module, kept: Mapping[str, Tensor]) -> nn.Module:
    """`original` itself, with every layer blind to the inputs that are not in `kept`, {name: indices}.

    Raises:
        TypeError: there is no mask for a layer of that kind.
    """
    for name, indices in kept.items():
        module = original.get_submodule(name)
        lost = _complement(indices, inputs_of(module))
        if isinstance(module, Norm):
            original.set_submodule(name, OverKept(smaller.get_submodule(name), indices, inputs_of(module)))
        elif isinstance(module, nn.MultiheadAttention):
            _mask_attention(module, lost)
        elif isinstance(module, nn.Linear):
            module.weight[:, lost] = 0
        elif isinstance(module, _ConvNd):
            _mask_convolution(module, lost)
        else:
            raise TypeError(f"{name}: no mask for a {type(module).__name__}")
    return original


class OverKept(nn.Module):
    """A smaller normalisation in the place of a larger one: applied to the kept channels, zero elsewhere."""

    def __init__(self, norm: nn.Module, kept: Tensor, width: int) -> None:
        super().__init__()
        self.norm, self.kept, self.width = copy.deepcopy(norm), kept, width
        self.is_last = type(norm) is nn.LayerNorm

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        dim = -1 if self.is_last or x.shape[1] != self.width else 1
        result: Tensor = self.norm(x.index_select(dim, self.kept), *rest)
        return torch.zeros_like(x).index_copy(dim, self.kept, result)


def _complement(kept: Tensor, count: int) -> Tensor:
    lost = torch.ones(count, dtype=torch.bool)
    lost[kept] = False
    return lost.nonzero().squeeze(1)


def _mask_convolution(module: _ConvNd, lost: Tensor) -> None:
    if module.groups > 1:
        module.register_forward_pre_hook(lambda _, args: (args[0].index_fill(1, lost, 0), *args[1:]))
    elif module.transposed:
        module.weight[lost] = 0
    else:
        module.weight[:, lost] = 0


def _mask_attention(module: nn.MultiheadAttention, lost: Tensor) -> None:
    """Inputs, queries, keys, values and what is read, all at the same indices."""
    width = module.embed_dim
    rows = torch.cat([lost, lost + width, lost + 2 * width])
    module.in_proj_weight[rows] = 0
    module.in_proj_weight[:, lost] = 0
    if module.in_proj_bias is not None:
        module.in_proj_bias[rows] = 0
    module.out_proj.weight[:, lost] = 0
