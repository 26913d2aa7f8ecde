"""Least squares from moments, shrunk towards weights that are known already.

a    inputs, t targets, seen together as rows (a, t)      (d + N)
G    covariance of a (d, d),  Q  cross-covariance of a and t (d, N),  T  variance of t (N,)
W    weight (d, N), b bias (N,): t ≈ W^T a + b
W0   prior weight
W  = W0 + (G + λI)^-1 (Q - G W0)                          λ = 0: least squares; λ → ∞: W0
b  = mean(t) - W^T mean(a)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.algebra.linalg import add_ridge, factorise, live_rows
from recoup.algebra.moments import Moments


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A weight (d, N) with its bias (N,), the relative ridge it was found with (inf: it is the prior), and λ itself."""

    weight: Tensor
    bias: Tensor
    ridge: float
    amount: float
    condition: float


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Moments of inputs and targets together; `centred` is false for a layer that has no bias to hold a mean."""

    moments: Moments
    inputs: int
    centred: bool = True

    @property
    def second(self) -> Tensor:
        """What the fit minimises over (d + N, d + N): the covariance, or without a bias the second moments."""
        if self.centred:
            return self.moments.covariance
        return self.moments.covariance + torch.outer(self.moments.mean, self.moments.mean)

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Of the inputs (d,) and of the targets (N,)."""
        return self.moments.mean[: self.inputs], self.moments.mean[self.inputs :]

    def error(self, fitted: Fitted) -> Tensor:
        """Expected squared error of every output (N,) on the rows seen."""
        second, d, W = self.second, self.inputs, fitted.weight
        spread = second[d:, d:].diagonal() - 2 * (W * second[:d, d:]).sum(0) + (W * (second[:d, :d] @ W)).sum(0)
        if not self.centred:
            return spread.clamp(min=0)
        a, t = self.means
        return spread.clamp(min=0) + (t - fitted.bias - a @ W).square()

    def variance(self) -> Tensor:
        """Of every target (N,)."""
        return self.second.diagonal()[self.inputs :]


def shrunk(joint: Joint, prior: Tensor, ridges: Sequence[float], name: str = "layer") -> list[Fitted]:
    """A fit for each relative ridge; infinity stands for the prior weight with the bias that suits it."""
    second, d = joint.second, joint.inputs
    live = live_rows(second[:d, :d]).nonzero().squeeze(1)
    G = second[live][:, live]
    missing = (second[:d, d:] - second[:d, :d] @ prior)[live]
    found = []
    for ridge in ridges:
        weight, amount, condition = prior.clone(), 0.0, 1.0
        if ridge < float("inf") and live.numel():
            system, amount = add_ridge(G, ridge)
            factor = factorise(system, name)
            condition = factor.condition
            weight[live] += factor.solve(missing)
        a, t = joint.means
        bias = t - a @ weight if joint.centred else torch.zeros_like(t)
        found.append(Fitted(weight, bias, ridge, amount, condition))
    return found
