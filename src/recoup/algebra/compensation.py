"""Closed-form recovery: refit the kept inputs of a layer so that its output is the original one as nearly as possible.

    G    covariance of the layer's inputs                    (d, d)
    W    original weight, y = W^T a + b                      (d, N)
    S, P kept and pruned rows
    Ŵ_S = W_S + (G_SS + λI)^-1 G_SP W_P                      equals G_SS^-1 G_SC W for λ = 0
    b̂   = b + mean^T (W - Ŵ)                                 the mean of the output is kept exactly

The ridge λ pulls towards the original weights, not towards zero: keeping everything changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.algebra.linalg import add_ridge, factorise, live_rows


@dataclass(frozen=True, slots=True, eq=False)
class Compensated:
    """The refitted weight (d, N) with zero rows where pruned, and what it costs.

    `residual` (N,) is the expected squared error per output, `variance` (N,) the output's own variance;
    `ridge` the absolute amount added to the diagonal, `condition` a lower bound of the system's condition.
    """

    weight: Tensor
    residual: Tensor
    variance: Tensor
    ridge: float
    condition: float

    @property
    def relative_residual(self) -> float:
        """Expected squared error of all outputs over their variance; 0 for a layer whose output never varies."""
        total = float(self.variance.sum())
        return float(self.residual.sum()) / total if total > 0 else 0.0


def compensate(covariance: Tensor, weight: Tensor, keep: Tensor, *, ridge: float, name: str = "layer") -> Compensated:
    """The weight that best restores y = W^T a from the rows where `keep` (d,) is true.

    Raises:
        IllConditionedError: the kept block of the covariance is singular at this ridge.
    """
    variance = _energy(covariance, weight)
    if bool(keep.all()):
        return Compensated(weight.clone(), torch.zeros_like(variance), variance, 0.0, 1.0)
    live = live_rows(covariance)
    solved = (keep & live).nonzero().squeeze(1)
    pruned = (~keep & live).nonzero().squeeze(1)
    fitted = torch.where(keep[:, None], weight, torch.zeros_like(weight))
    amount, condition = 0.0, 1.0
    if solved.numel() and pruned.numel():
        system, amount = add_ridge(covariance[solved][:, solved], ridge)
        factor = factorise(system, name)
        condition = factor.condition
        fitted[solved] += factor.solve(covariance[solved][:, pruned] @ weight[pruned])
    return Compensated(fitted, _energy(covariance, weight - fitted), variance, amount, condition)


def rescale_variance(covariance: Tensor, fitted: Compensated) -> Compensated:
    """`fitted` with every output scaled so that its variance is the original one, as the authors' code does."""
    after = _energy(covariance, fitted.weight)
    usable = (after > 0) & (fitted.variance > 0)
    scale = torch.where(usable, (fitted.variance / after.clamp(min=torch.finfo(after.dtype).tiny)).sqrt(), 1.0)
    weight = fitted.weight * scale
    # y - s ŷ with ŷ = fitted: E = var_old + s² var_new - 2 s cov, and cov follows from the known residual.
    shared = (fitted.variance + after - fitted.residual) / 2
    residual = (fitted.variance + scale.square() * after - 2 * scale * shared).clamp(min=0)
    return Compensated(weight, residual, fitted.variance, fitted.ridge, fitted.condition)


def _energy(covariance: Tensor, weight: Tensor) -> Tensor:
    """w_n^T G w_n for every column n: the variance of each output (N,)."""
    return (weight * (covariance @ weight)).sum(dim=0).clamp(min=0)
