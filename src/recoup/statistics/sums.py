"""What a layer reads, summed up: under one weight per row, or under one for every pattern of its outputs.

    s   squared slopes g'(y)² of the activation behind the layer   (n, N), one for each row and output
    k   a pattern: outputs whose slopes go together; its weight is the mean of s over them

The paper weighs a row by g'(y)², of which there is one for every output, and prints a single covariance. With a weight
for each output there are N covariances. Outputs that share a pattern share one: least squares do not see the size of
a weight, so slopes are compared relative to their norm. With N <= `PATTERNS` outputs every one has its own.

Memory: a float64 matrix of (inputs · kernel)² for every pattern, and one for all outputs together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recoup.algebra.clusters import clusters
from recoup.algebra.moments import Accumulator, Moments

# At most so many covariances for one layer: enough to tell apart what fires together, few enough to keep.
PATTERNS = 8
# Rows, spread over the first ones seen, by whose slopes outputs are put together.
FIRST_ROWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The `outputs` (n,) of a layer whose slopes go together, with the `moments` and the `mean` (d,) of its inputs.

    `slopes` (n,) is the mean of g'(y)² of each: how much an error there counts.
    """

    outputs: Tensor
    moments: Moments
    mean: Tensor
    slopes: Tensor


class RowSums:
    """Moments of rows of d inputs; with a `share` above 1, of the channels of a flattened map at all its positions."""

    def __init__(self, features: int, share: int, device: torch.device) -> None:
        self._sums, self.share = Accumulator(features, device), share
        self._mean = torch.zeros(features * share, dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, rows: Tensor, weights: Tensor | None) -> None:
        """Add rows (n, d) with weights (n,)."""
        if self.share == 1:
            self._sums.update(rows, weights)
            return
        # Positions become rows of channels; the mean of every single input is kept besides.
        weights = torch.ones(len(rows), device=rows.device) if weights is None else weights
        self._mean += weights.double() @ rows.double()
        self._total += weights.double().sum()
        by_position = rows.unflatten(1, (-1, self.share)).transpose(1, 2).flatten(0, 1)
        self._sums.update(by_position, weights.repeat_interleave(self.share))

    def moments(self) -> Moments:
        """What has been seen so far."""
        return self._sums.moments()

    def mean(self, moments: Moments) -> Tensor:
        """Of every input (d,)."""
        return moments.mean if self.share == 1 else self._mean / self._total.clamp(min=1e-300)


class PatternSums:
    """Row sums for every pattern of a layer's outputs, which the first rows decide on."""

    def __init__(self, make: Callable[[], RowSums], seed: int) -> None:
        self._make, self._seed = make, seed
        self._sums: list[RowSums] = []
        self._pattern_of = torch.zeros(0, dtype=torch.long)
        self._slopes = torch.zeros(0, dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)
        self._rows = 0

    def update(self, rows: Tensor, slopes: Tensor) -> None:
        """Add rows (n, d), given the squared slopes of all outputs (n, N)."""
        if not self._sums:
            self._begin(slopes)
        among = torch.nn.functional.one_hot(self._pattern_of, len(self._sums)).to(slopes.dtype)
        weights = slopes @ (among / among.sum(dim=0))
        for sums, weight in zip(self._sums, weights.T, strict=True):
            sums.update(rows, weight)
        self._slopes += slopes.double().sum(dim=0)
        self._squares += slopes.double().mean(dim=1).square().sum()
        self._rows += len(rows)

    def _begin(self, slopes: Tensor) -> None:
        some = slopes[:: max(1, len(slopes) // FIRST_ROWS)]
        directions = torch.nn.functional.normalize(some.T.double(), dim=1)
        self._pattern_of = clusters(directions, PATTERNS, self._seed)
        self._sums = [self._make() for _ in range(int(self._pattern_of.max()) + 1)]
        self._slopes = torch.zeros(slopes.shape[1], dtype=torch.float64, device=slopes.device)
        self._squares = self._squares.to(slopes.device)

    def result(self) -> tuple[Moments, Tensor, tuple[Pattern, ...]]:
        """Moments and mean under the mean of all slopes, and those of every pattern; there has to be a row.

        Where outputs were closed on every row, all rows count alike.
        """
        parts = [sums.moments() for sums in self._sums]
        means = [sums.mean(part) for sums, part in zip(self._sums, parts, strict=True)]
        counts = torch.bincount(self._pattern_of).tolist()
        squares = float(self._squares) * self._sums[0].share
        whole, mean = _together(parts, means, [count / len(self._pattern_of) for count in counts], squares)
        slopes = self._slopes / max(1, self._rows)
        found = []
        for number, (part, centre) in enumerate(zip(parts, means, strict=True)):
            outputs = (self._pattern_of == number).nonzero().squeeze(1)
            found.append(Pattern(outputs, part, centre, slopes[outputs]))
        return whole, mean, tuple(found)

    @property
    def is_empty(self) -> bool:
        """Whether no row was seen."""
        return not self._sums


def _together(
    parts: Sequence[Moments], means: Sequence[Tensor], shares: Sequence[float], squares: float
) -> tuple[Moments, Tensor]:
    """Moments under the mean of all slopes, to which every pattern adds the `share` of the outputs that are its."""
    both = Accumulator(parts[0].mean.numel(), parts[0].mean.device)
    for part, share in zip(parts, shares, strict=True):
        both.add(replace(part, total=share * part.total, scatter=share * part.scatter))
    whole = replace(both.moments(), rows=parts[0].rows, squares=squares)
    weighed = [share * part.total * mean for part, mean, share in zip(parts, means, shares, strict=True)]
    return whole, torch.stack(weighed).sum(dim=0) / max(whole.total, 1e-300)
