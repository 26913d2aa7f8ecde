"""Least squares from moments, shrunk towards weights that are known already: one solver, two kinds of targets.

    a    inputs (d,), t targets (N,): t ≈ W^T a + b
    G    covariance of a (d, d),  Q  covariance of a and t (d, N)
    W0   prior weight (d, N)
    W  = W0 + (G + λI)^-1 (Q - G W0)                         λ = 0: least squares; λ → ∞: W0
    b  = mean(t) - W^T mean(a)

Compensation has the layer's own output for a target, y = W_all^T a_all, of which the kept inputs S remain and P are
pruned. With the layer's own weights as the prior, Q - G_SS W_S = G_SP W_P: only covariances of the original network are
needed, and keeping everything changes nothing.

In the pruned network inputs have drifted and targets are the original's outputs; both are then seen together as rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recoup.algebra.linalg import Factor, add_ridge, factorise, independent_rows, live_rows
from recoup.algebra.moments import Moments


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


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A weight (d, N) with its bias (N,), the relative ridge it was found with (inf: it is the prior), and λ itself."""

    weight: Tensor
    bias: Tensor
    ridge: float
    amount: float
    condition: float


class Pairs(Protocol):
    """Inputs and targets of a layer seen together, whatever of them is kept: moments here, rows in `few_rows`."""

    @property
    def centred(self) -> bool:
        """False for a layer that has no bias to hold a mean."""
        ...

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Of the inputs (d,) and of the targets (N,)."""
        ...

    @property
    def effective(self) -> float:
        """As many rows of equal weight tell as much."""
        ...

    def fits(self, prior: Tensor, ridges: Sequence[float], name: str = "layer") -> list[Fitted]:
        """A fit for each relative ridge; infinity stands for the prior weight with the bias that suits it."""
        ...

    def errors(self, fits: Sequence[Fitted]) -> Tensor:
        """Expected squared error of every output on the rows seen, for each of some fits (n, N)."""
        ...

    def variance(self) -> Tensor:
        """Of every target (N,)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Moments of inputs and targets together; `centred` is false for a layer that has no bias to hold a mean.

    Where `parts` (d + N,) numbers them, targets are made of the inputs of their own part alone.
    """

    moments: Moments
    inputs: int
    centred: bool = True
    parts: Tensor | None = None

    @property
    def second(self) -> Tensor:
        """What the fit minimises over (d + N, d + N): the covariance, or without a bias the second moments."""
        found = self.moments.covariance
        if not self.centred:
            found = found + torch.outer(self.moments.mean, self.moments.mean)
        return found if self.parts is None else torch.where(self.parts[:, None] == self.parts, found, 0.0)

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Of the inputs (d,) and of the targets (N,)."""
        return self.moments.mean[: self.inputs], self.moments.mean[self.inputs :]

    @property
    def effective(self) -> float:
        """As many rows of equal weight tell as much."""
        return self.moments.effective

    def fits(self, prior: Tensor, ridges: Sequence[float], name: str = "layer") -> list[Fitted]:
        """A fit for each relative ridge; infinity stands for the prior weight with the bias that suits it.

        Raises:
            IllConditionedError: the covariance of the inputs is singular at one of the ridges.
        """
        second, d = self.second, self.inputs
        G, missing = second[:d, :d], second[:d, d:] - second[:d, :d] @ prior
        live = live_rows(G).nonzero().squeeze(1)
        if len(live) < d:
            G, missing = G[live][:, live], missing[live]
        found = []
        for ridge in ridges:
            weight, amount, condition = prior.clone(), 0.0, 1.0
            if ridge < math.inf and live.numel():
                factor, amount = _system(G, ridge, name)
                condition = factor.condition
                weight[live] += factor.solve(missing)
            found.append(Fitted(weight, fitting_bias(self, weight), ridge, amount, condition))
        return found

    def errors(self, fits: Sequence[Fitted]) -> Tensor:
        """Expected squared error of every output on the rows seen, for each of some fits (n, N)."""
        second, d = self.second, self.inputs
        G, Q, own = second[:d, :d], second[:d, d:], second.diagonal()[d:]
        spreads = [own + (fit.weight * (G @ fit.weight - 2 * Q)).sum(0) for fit in fits]
        return torch.stack([s.clamp(min=0) + self._missed(fit) for s, fit in zip(spreads, fits, strict=True)])

    def _missed(self, fit: Fitted) -> Tensor:
        """The square of what a bias misses of every target's mean (N,)."""
        a, t = self.means
        return (t - fit.bias - a @ fit.weight).square() if self.centred else torch.zeros_like(t)

    def variance(self) -> Tensor:
        """Of every target (N,)."""
        found = self.moments.variance[self.inputs :]
        return found if self.centred else found + self.means[1].square()


def fitting_bias(pairs: Pairs, weight: Tensor) -> Tensor:
    """The bias (N,) that suits a weight: what it leaves of the targets' means, or nothing in a layer without one."""
    a, t = pairs.means
    return t - a @ weight if pairs.centred else torch.zeros_like(t)


def compensate(
    covariance: Tensor,
    weight: Tensor,
    keep: Tensor,
    *,
    ridge: float,
    name: str = "layer",
    variance: Tensor | None = None,
) -> Compensated:
    """The weight that best restores y = W^T a from the rows where `keep` (d,) is true.

    Without a ridge, a kept row that is an exact combination of other kept ones is left out: its weight is zero. The
    `variance` of y (N,) costs as much as the fit, and need not be computed again where it is known.

    Raises:
        IllConditionedError: the kept block of the covariance is singular at this ridge.
    """
    variance = energy(covariance, weight) if variance is None else variance
    if bool(keep.all()):
        return Compensated(weight.clone(), torch.zeros_like(variance), variance, 0.0, 1.0)
    live = live_rows(covariance)
    if not ridge:
        kept = (keep & live).nonzero().squeeze(1)
        dependent = kept[~independent_rows(covariance[kept][:, kept])]
        keep = keep.index_fill(0, dependent, value=False)
    solved, pruned = (keep & live).nonzero().squeeze(1), (~keep).nonzero().squeeze(1)
    fitted = torch.where(keep[:, None], weight, torch.zeros_like(weight))
    residual = energy(covariance[pruned][:, pruned], weight[pruned])
    amount, condition = 0.0, 1.0
    if solved.numel() and pruned.numel():
        factor, amount = _system(covariance[solved][:, solved], ridge, name)
        condition = factor.condition
        missing = covariance[solved][:, pruned] @ weight[pruned]
        change = factor.solve(missing)
        fitted[solved] += change
        # What is lost is W_P less the change of W_S, and (G_SS + λI) change = missing.
        residual = (residual - (change * (missing + amount * change)).sum(0)).clamp(min=0)
    return Compensated(fitted, residual, variance, amount, condition)


def energy(covariance: Tensor, weight: Tensor) -> Tensor:
    """w_n^T G w_n for every column n of the weight: the variance of each output (N,)."""
    return (weight * (covariance @ weight)).sum(dim=0).clamp(min=0)


def rescale_variance(covariance: Tensor, fitted: Compensated) -> Compensated:
    """`fitted` with every output scaled so that its variance is the original one, as the authors' code does."""
    after = energy(covariance, fitted.weight)
    usable = (after > 0) & (fitted.variance > 0)
    scale = torch.where(usable, (fitted.variance / after.clamp(min=torch.finfo(after.dtype).tiny)).sqrt(), 1.0)
    weight = fitted.weight * scale
    # y - s ŷ with ŷ = fitted: E = var_old + s² var_new - 2 s cov, and cov follows from the known residual.
    shared = (fitted.variance + after - fitted.residual) / 2
    residual = (fitted.variance + scale.square() * after - 2 * scale * shared).clamp(min=0)
    return Compensated(weight, residual, fitted.variance, fitted.ridge, fitted.condition)


def moved(before: Tensor, after: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias `after` (N,), and `before` where the two differ by no more than `dtype` can tell of its weights.

    `terms` (N,) is the size of the sums whose difference a bias is, ∑ |w| |mean(a)|. A layer that had no bias gives 0
    for an input of 0, and what follows may tell 0 from 1e-10: a division by the norm makes 0 of one, 1 of the other.
    """
    return torch.where((after - before).abs() <= torch.finfo(dtype).eps * terms, before, after)


def on_new_rows(residual: float, rows: float, inputs: int) -> float | None:
    """The error to expect on new rows of a fit that leaves `residual` on the n rows it was made from; None: not known.

    A fit of k numbers, d weights and a mean, takes the share k / n of the error out of its own rows and adds to that of
    others: n (n - 1) / (n - k)(n - k - 1) between them, exact for Gaussian inputs. From n = k + 1 on it can be told.
    """
    fitted = inputs + 1
    if rows <= fitted + 1:
        return None
    return residual * rows * (rows - 1) / ((rows - fitted) * (rows - fitted - 1))


def _system(G: Tensor, ridge: float, name: str) -> tuple[Factor, float]:
    """The factor of G + λI, and λ."""
    system, amount = add_ridge(G, ridge)
    return factorise(system, name), amount
