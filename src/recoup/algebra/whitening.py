"""Parameters of a layer in which every direction counts alike, so that iterations need not find out about the scales.

    a    what the layer reads, with a 1 for its bias      (d,)
    G    second moments of a, plus a small ridge          (d, d) = C C^T
    s    curvature of the loss along each output          (N,)
    U    parameters                                       (N, d)
    Δ    change of the weight, bias last                  (N, d) = diag(s)^-1/2 U C^-1

A change Δ moves the outputs by E|Δ a|² = tr Δ G Δ^T, which is |U|² for outputs that matter alike. Conjugate gradients
on Δ would spend their iterations on inputs that vary together; on U they solve a linear layer in one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.algebra.linalg import add_ridge, factorise
from recoup.algebra.moments import Moments

# Added to the second moments, relative to their mean: directions that hardly vary are not blown up.
RIDGE = 0.1
# An output that matters less than this share of the mean counts as if it mattered so much.
LEAST = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Whitening:
    """Turns parameters U into changes: `inputs` is C^-1 (d, d), or None for the identity, `outputs` s^-1/2 (N, 1)."""

    inputs: Tensor | None
    outputs: Tensor

    def __call__(self, parameters: Tensor) -> Tensor:
        """Δ (N, d) of U (N, d)."""
        return self.outputs * (parameters if self.inputs is None else parameters @ self.inputs)

    def relative_to(self, matrix: Tensor) -> Whitening:
        """In units such that parameters of random signs make changes with the root mean square of `matrix` (N, d)."""
        spread = 1.0 if self.inputs is None else self.inputs.square().sum() / len(self.inputs)
        size = (self.outputs.square().mean() * spread).sqrt()
        return Whitening(self.inputs, self.outputs * (matrix.square().mean().sqrt() / size))


def whitened_inputs(moments: Moments, has_bias: bool, ridge: float = RIDGE) -> Tensor:
    """C^-1 for inputs with these moments, which do not have the 1 for a bias."""
    second, _ = add_ridge(moments.covariance + torch.outer(moments.mean, moments.mean), ridge)
    if not bool(second.any()):  # inputs that are always zero: nothing to whiten
        second = torch.eye(len(second)).to(second)
    if has_bias:
        mean, one = moments.mean[:, None], second.new_ones(1, 1)
        second = torch.cat([torch.cat([second, mean], dim=1), torch.cat([mean.T, one], dim=1)])
    lower = factorise(second).lower
    inverse: Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
    return inverse


def whitened_outputs(gradients: Tensor) -> Tensor:
    """s^-1/2 (N, 1) from J^T z for random signs z, as parameters (N, d): their squares are curvatures on average."""
    curvature = gradients.square().mean(dim=1, keepdim=True)
    return curvature.clamp(min=LEAST * float(curvature.mean()) + torch.finfo(curvature.dtype).tiny).rsqrt()
