"""Nonlinear least squares: a few Gauss-Newton steps, each a linear problem solved by conjugate gradients.

    r_i(θ)   residuals of piece i, any shape;   loss = Σ_i |r_i|²
    J_i      its Jacobian, only ever multiplied with vectors
    (Σ J^T J + λ) δ = -Σ J^T r                  then θ ← θ + t δ with the largest t of 1, 1/2, 1/4 ... that helps

λ is a share of the curvature along the gradient, so nothing depends on the scale of θ or r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import jvp, vjp

Parameters: TypeAlias = tuple[Tensor, ...]
Residual: TypeAlias = Callable[[Parameters], Tensor]

# Share of the curvature along the gradient that is added to all directions.
DAMPING = 1e-3
# The shortest step that is tried, as a share of the full one.
SHORTEST = 1 / 16


def gauss_newton(pieces: Sequence[Residual], start: Parameters, iterations: int) -> tuple[Parameters, float, float]:
    """Parameters one step from `start`, with the loss there and before; `start` itself if no step helps."""
    before = total(pieces, start)
    step = _solve(pieces, start, iterations)
    length = 1.0
    while length >= SHORTEST:
        moved = tuple(value + length * change for value, change in zip(start, step, strict=True))
        loss = total(pieces, moved)
        if loss < before:
            return moved, loss, before
        length /= 2
    return start, before, before


def total(pieces: Sequence[Residual], parameters: Parameters) -> float:
    """The sum of squared residuals."""
    with torch.no_grad():
        return float(sum(piece(parameters).square().sum(dtype=torch.float64) for piece in pieces))


def _solve(pieces: Sequence[Residual], at: Parameters, iterations: int) -> Parameters:
    left = tuple(-part for part in _gradient(pieces, at))
    found = tuple(torch.zeros_like(part) for part in left)
    direction, size, damping = left, _dot(left, left), torch.zeros(())
    for number in range(iterations):
        if not float(size) > 0:
            break
        curved = _curvature(pieces, at, direction)
        if number == 0:
            damping = DAMPING * _dot(direction, curved) / size
        curved = _sum(curved, direction, damping)
        length = size / _dot(direction, curved)
        found, left = _sum(found, direction, length), _sum(left, curved, -length)
        smaller = _dot(left, left)
        direction, size = _sum(left, direction, smaller / size), smaller
    return found


def _gradient(pieces: Sequence[Residual], at: Parameters) -> Parameters:
    parts = []
    for piece in pieces:
        residual, pull = _pulled(piece, at)
        parts.append(pull(residual))
    return tuple(torch.stack(same).sum(0) for same in zip(*parts, strict=True))


def _curvature(pieces: Sequence[Residual], at: Parameters, direction: Parameters) -> Parameters:
    """Σ J^T J times `direction`."""
    parts = []
    for piece in pieces:
        moved: Tensor = jvp(piece, (at,), (direction,))[1]
        parts.append(_pulled(piece, at)[1](moved))
    return tuple(torch.stack(same).sum(0) for same in zip(*parts, strict=True))


def _pulled(piece: Residual, at: Parameters) -> tuple[Tensor, Callable[[Tensor], Parameters]]:
    """The residual, and the function that multiplies J^T with a vector."""
    pair = vjp(piece, at)
    return pair[0], lambda vector: pair[1](vector)[0]


def _dot(left: Parameters, right: Parameters) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()


def _sum(left: Parameters, right: Parameters, factor: Tensor) -> Parameters:
    return tuple(a + factor * b for a, b in zip(left, right, strict=True))
