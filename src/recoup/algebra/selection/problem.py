"""What a selector is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer that reads the channels in question.

    `covariance` G (d, d) of its inputs, `weight` W (d, N), and `channel_of` (d,): the channel each row belongs to,
    or -1 for a row that stays whatever is chosen. Errors are relative to `scale`: the variance of the layer's own
    output, unless it is a part of a larger one and counts beside the others.
    """

    covariance: Tensor
    weight: Tensor
    channel_of: Tensor
    scale: float | None = None


def output_variance(layer: Layer) -> float:
    """tr(W^T G W): the variance of a layer's outputs, added up."""
    return float((layer.weight * (layer.covariance @ layer.weight)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Rank `width` channels by how much the `layers` that read them would miss them.

    Channels where `free` (width,) is false stay in any case. `filters` (width, f) are the weights that produce each
    channel, as they are, for selectors that look at nothing else. `ridge` is relative to each layer's mean variance.
    """

    width: int
    layers: tuple[Layer, ...]
    free: Tensor
    filters: Tensor
    ridge: float
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """Where the matrices live."""
        return self.free.device


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Channels from the most to the least valuable, the ones that must stay first.

    `loss[n]` is the relative squared error, summed over layers, when only the first n of `order` are kept;
    None for a selector that does not know it. Of the channels, `most` can be chosen at all: the others are constant, or
    exact combinations of those before them. None where all can be.
    """

    order: Tensor
    loss: Tensor | None = None
    most: int | None = None


class Selector(Protocol):
    """A function from a problem to a ranking; a plain tensor of channel numbers, best first, will do too."""

    def __call__(self, problem: Problem, /) -> Ranking | Tensor:
        """Rank the channels of `problem`."""
        ...
