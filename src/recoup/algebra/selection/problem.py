"""What a selector is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recoup.algebra.selection.evidence import Evidence
from recoup.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer that reads the channels in question.

    `covariance` G (d, d) of its inputs, `weight` W (d, N), and `channel_of` (d,): the channel each row belongs to,
    or -1 for a row that stays whatever is chosen. `mean` (d,) of its inputs, where the covariance does not contain it.
    Errors are relative to `scale`: the variance of the layer's own output, unless it is a part of a larger one and
    counts beside the others.
    """

    covariance: Tensor
    weight: Tensor
    channel_of: Tensor
    mean: Tensor | None = None
    scale: float | None = None

    @property
    def second_moments(self) -> Tensor:
        """E[a a^T] of its inputs (d, d); the covariance where there is no mean."""
        return self.covariance if self.mean is None else self.covariance + torch.outer(self.mean, self.mean)

    def by_channel(self, width: int) -> Tensor:
        """Which row belongs to which channel, ones and zeros (d, width): a product adds rows in a fixed order."""
        every = torch.arange(width, device=self.channel_of.device)
        return (self.channel_of[:, None] == every).double()

    def reads(self, width: int) -> Tensor:
        """Which of `width` channels the layer reads, a bool mask (width,)."""
        every = torch.arange(width, device=self.channel_of.device)
        return torch.isin(every, self.channel_of)


def output_variance(layer: Layer) -> float:
    """tr(W^T G W): the variance of a layer's outputs, added up."""
    return float((layer.weight * (layer.covariance @ layer.weight)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Rank `width` channels by how much the `layers` that read them would miss them.

    Channels where `free` (width,) is false stay in any case. `filters` (width, f) are the weights that produce each
    channel, as they are, for selectors that look at nothing else. `ridge` is relative to each layer's mean variance.
    `evidence` measures on request what else a selector looks at; a problem made by hand may do without.

    Where `layers` are parts of what reads the channels, one for each kind of output, `whole` are the layers themselves,
    with their weights as they are. `name` is that of the group. With `parts` (width,), every part keeps as many of its
    channels, and -1 stands for those that stay; the best of every part are taken in turn, whatever the order says.
    """

    width: int
    layers: tuple[Layer, ...]
    free: Tensor
    filters: Tensor
    ridge: float
    seed: int = 0
    evidence: Evidence | None = None
    whole: tuple[Layer, ...] = ()
    name: str = ""
    parts: Tensor | None = None

    @property
    def readers(self) -> tuple[Layer, ...]:
        """The layers that read the channels, each in one piece."""
        return self.whole or self.layers

    @property
    def device(self) -> torch.device:
        """Where the matrices live."""
        return self.free.device

    def evidence_for(self, selector: str, what: str) -> Evidence:
        """The evidence, or an error that names the selector and what it misses."""
        if self.evidence is None:
            raise UsageError(
                f"{selector} looks at {what}, which this problem does not have. Let recoup.rank or recoup.prune make "
                "it, give the Problem an `evidence`, or choose a selector that needs none, such as 'backward'."
            )
        return self.evidence

    def require_filters(self, filters: Tensor, selector: str) -> Tensor:
        """Filters (width, f), or an error that names the selector if no weight makes these channels."""
        if not filters.shape[1]:
            raise UsageError(
                f"{selector} looks at the weights that make channels, and no layer of the network makes these. Leave "
                "the group out (exclude=, --exclude), or choose a selector that looks at readers, such as 'backward'."
            )
        return filters


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


def by_score(problem: Problem, score: Tensor) -> Ranking:
    """The ranking by a score (width,), the largest first, and behind the channels that stay; ties as they come."""
    return Ranking(torch.where(problem.free, score, torch.inf).argsort(descending=True, stable=True))
