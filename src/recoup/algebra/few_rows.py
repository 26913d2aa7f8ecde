"""The same least squares where rows are no more than inputs: everything in the space of the rows.

    w    weight of each row, Σ w = 1          (n,)
    X    inputs less their mean, times √w     (n, d)     T  targets likewise (n, N)
    G = X^T X,  Q = X^T T                                both are left unmade
    K = X X^T                                 (n, n)
    W = W0 + X^T (K + λI)^-1 (T - X W0)                  = W0 + (G + λI)^-1 (Q - G W0)

Both sides of the last line are equal since X^T (K + λI) = (G + λI) X^T. G has d² numbers and its factor takes d³/3
operations; with 200 rows of 4,608 inputs K is smaller five hundred times, and errors are read off the rows.

The slow twin is `Joint` in `ridge`; whoever collects pairs need not know which it gets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.algebra.linalg import Factor, factorise, live
from recoup.algebra.moments import Accumulator
from recoup.algebra.ridge import Fitted, Joint, Pairs, fitting_bias


@dataclass(frozen=True, slots=True, eq=False)
class FewRows:
    """Rows of `inputs` inputs and their targets side by side (n, d + N), with the weight of each (n,), float64.

    `centred` is false for a layer that has no bias to hold a mean.
    """

    rows: Tensor
    weights: Tensor
    inputs: int
    centred: bool = True

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Of the inputs (d,) and of the targets (N,)."""
        mean = self._shares @ self.rows
        return mean[: self.inputs], mean[self.inputs :]

    @property
    def effective(self) -> float:
        """As many rows of equal weight tell as much."""
        squares = float(self.weights.square().sum())
        return float(self.weights.sum()) ** 2 / squares if squares > 0 else 0.0

    @property
    def _shares(self) -> Tensor:
        return self.weights / self.weights.sum().clamp(min=torch.finfo(torch.float64).tiny)

    def fits(self, prior: Tensor, ridges: Sequence[float], name: str = "layer") -> list[Fitted]:
        """A fit for each relative ridge, as `Joint.fits` has it."""
        if 0.0 in ridges:  # more inputs than rows: which of them can do without a ridge is for their covariance to say
            return self.as_moments().fits(prior, ridges, name)
        X, T = self._scaled()
        missing, spread = T - X @ prior, X.square().sum(dim=0)
        varying = live(spread).nonzero().squeeze(1)
        X, scale = (X, spread) if len(varying) == len(spread) else (X[:, varying], spread[varying])
        gram = X @ X.T
        found = []
        for ridge in ridges:
            weight, amount, condition = prior.clone(), 0.0, 1.0
            if ridge < math.inf and varying.numel():
                amount = ridge * float(scale.mean())
                factor = factorise(gram + amount * torch.eye(len(gram)).to(gram), name)
                weight[varying] += X.T @ factor.solve(missing)
                condition = _condition(factor, amount)
            found.append(Fitted(weight, fitting_bias(self, weight), ridge, amount, condition))
        return found

    def errors(self, fits: Sequence[Fitted]) -> Tensor:
        """Expected squared error of every output on the rows seen, for each of some fits (n, N)."""
        inputs, targets = self.rows[:, : self.inputs], self.rows[:, self.inputs :]
        left = (targets - inputs @ fit.weight - fit.bias for fit in fits)
        return torch.stack([self._shares @ each.square() for each in left])

    def variance(self) -> Tensor:
        """Of every target (N,)."""
        _, T = self._scaled()
        return T.square().sum(dim=0)

    def as_moments(self) -> Joint:
        """The same rows, summed up."""
        sums = Accumulator(self.rows.shape[1], self.rows.device)
        sums.update(self.rows, self.weights)
        return Joint(sums.moments(), self.inputs, self.centred)

    def _scaled(self) -> tuple[Tensor, Tensor]:
        """X and T."""
        centred = self.rows - self._shares @ self.rows if self.centred else self.rows
        scaled = centred * self._shares.sqrt()[:, None]
        return scaled[:, : self.inputs], scaled[:, self.inputs :]


class Collector:
    """Pairs of inputs and targets as they come: rows while they are no more than the inputs, moments from there on."""

    def __init__(
        self,
        inputs: int,
        targets: int,
        device: torch.device | str,
        *,
        centred: bool = True,
        parts: Tensor | None = None,
    ) -> None:
        """`centred` and `parts` as `Joint` has them; targets that only see a part of the inputs are summed."""
        self._inputs, self._width, self._device = inputs, inputs + targets, device
        self._centred, self._parts = centred, parts
        self._sums: Accumulator | None = None if parts is None else Accumulator(self._width, device)
        self._rows: list[tuple[Tensor, Tensor | None]] = []
        self._count = 0

    def update(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add rows (n, d + N) with non-negative weights (n,)."""
        self._count += len(rows)
        if self._sums is None and self._count <= self._inputs:
            self._rows.append((rows, weights))
            return
        if self._sums is None:
            self._sums = Accumulator(self._width, self._device)
            for before in self._rows:
                self._sums.update(*before)
            self._rows = []
        self._sums.update(rows, weights)

    def pairs(self) -> Pairs:
        """What has been seen."""
        if self._sums is not None:
            return Joint(self._sums.moments(), self._inputs, self._centred, self._parts)
        empty = torch.zeros(0, self._width, dtype=torch.float64, device=self._device)
        rows = torch.cat([empty, *(rows.double() for rows, _ in self._rows)])
        weights = (rows.new_ones(len(part)) if own is None else own.double() for part, own in self._rows)
        return FewRows(rows, torch.cat([empty[:, 0], *weights]), self._inputs, self._centred)


def _condition(factor: Factor, amount: float) -> float:
    """A lower bound for G + λI, whose least eigenvalue is λ where rows are fewer than inputs."""
    largest = float(factor.lower.diagonal().square().max()) if factor.lower.numel() else amount
    return max(1.0, largest / amount)
