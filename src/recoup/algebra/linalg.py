"""The only place that factorises a matrix, so that every factorisation reports what it did.

S   symmetric positive (semi-)definite matrix          (d, d)
L   lower triangular, S = L L^T                         (d, d)
λ   ridge = `ridge` · mean diagonal of S, added to the diagonal
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.errors import IllConditionedError

# A diagonal entry below this share of the largest one is a constant, up to float32 rounding of the activations.
CONSTANT = 1e-12
# A row is an exact combination of others when this share of its variance, or less, is left once they are known: the
# rounding of float32 activations leaves some 1e-14.
SINGULAR = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A Cholesky factor, and `condition`: a lower bound on the condition number, read off its diagonal."""

    lower: Tensor
    condition: float

    def solve(self, right: Tensor) -> Tensor:
        """S^-1 `right`, for `right` of shape (d, n)."""
        return torch.cholesky_solve(right, self.lower)

    def inverse(self) -> Tensor:
        """S^-1, for the elimination recursions whose unknown it is."""
        return torch.cholesky_inverse(self.lower)


def factorise(matrix: Tensor, name: str = "covariance") -> Factor:
    """The Cholesky factor of a positive definite matrix.

    Raises:
        IllConditionedError: the matrix is singular or has a negative eigenvalue.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(lower.diagonal()).all()):
        raise IllConditionedError(
            f"{name}: the covariance of its {matrix.shape[0]} kept inputs is singular (leading minor {int(info)}). "
            "Raise `ridge`, calibrate on more samples, or keep fewer channels."
        )
    diagonal = lower.diagonal()
    condition = float((diagonal.max() / diagonal.min()) ** 2) if diagonal.numel() else 1.0
    return Factor(lower, condition)


def block_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of (n, r, r) blocks, and which of the n are positive definite (the others' factors are junk)."""
    lower, info = torch.linalg.cholesky_ex(blocks)
    return lower, info == 0


def add_ridge(matrix: Tensor, ridge: float) -> tuple[Tensor, float]:
    """S + λI and λ, the absolute amount that was added."""
    amount = ridge * float(matrix.diagonal().mean()) if matrix.numel() else 0.0
    system = matrix.clone()
    system.diagonal().add_(amount)
    return system, amount


def live_rows(covariance: Tensor) -> Tensor:
    """Which rows vary at all: a bool mask (d,); a constant row can be neither chosen nor regressed on."""
    return live(covariance.diagonal())


def live(variance: Tensor) -> Tensor:
    """The same by the variance (d,) of each."""
    return variance > CONSTANT * variance.max().clamp(min=torch.finfo(variance.dtype).tiny)


def independent_rows(matrix: Tensor) -> Tensor:
    """Which rows of a covariance are no combination of those before them: a bool mask (d,).

    Cholesky, in which a row of which nothing is left makes a column of zeros and is passed over.
    """
    variance = matrix.diagonal()
    lower, info = torch.linalg.cholesky_ex(matrix)
    if not int(info) and bool((lower.diagonal().square() > SINGULAR * variance).all()):
        return torch.ones_like(variance, dtype=torch.bool)
    lower = torch.zeros_like(matrix)
    independent = torch.zeros_like(variance, dtype=torch.bool)
    for row in range(len(matrix)):
        left = matrix[row:, row] - lower[row:, :row] @ lower[row, :row]
        independent[row] = left[0] > SINGULAR * variance[row]
        lower[row:, row] = torch.where(independent[row], left / left[0].clamp(min=1e-300).sqrt(), 0)
    return independent


def narrow_factor(weight: Tensor) -> Tensor:
    """F with F F^T = W W^T and no more columns than rows: losses that sum over outputs see only that product."""
    rows, columns = weight.shape
    if columns <= rows:
        return weight
    values, vectors = torch.linalg.eigh(weight @ weight.T)
    factor: Tensor = vectors * values.clamp(min=0).sqrt()
    return factor
