"""Nonlinear least squares: a few Gauss-Newton steps, each a linear problem solved by conjugate gradients.

    r_i(θ)   residuals of piece i, any shape;   loss = Σ_i |r_i|²
    J_i      its Jacobian, only ever multiplied with vectors, which a piece knows how to do
    (Σ J^T J + λ) δ = -Σ J^T r                  δ_1, δ_2 ...: the iterates of conjugate gradients

Some pieces are fitted to, others judge: the step is the iterate after which their loss is least. The first iterates
follow what all pieces have in common, the last ones also what the fitted pieces alone have; where even the first goes
too far, a half, a quarter ... of it is tried. λ is a share of the curvature along the gradient, so nothing depends on
the scale of θ or r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Parameters: TypeAlias = tuple[Tensor, ...]

# Share of the curvature along the gradient that is added to all directions.
DAMPING = 1e-3
# The shortest step that is tried, as a share of the first iterate.
SHORTEST = 1 / 16
# Iterates in a row that may judge worse than the best one before.
PATIENCE = 2


class Tangent(Protocol):
    """A piece about one point: its residuals there, and products with its Jacobian."""

    residual: Tensor

    def push(self, direction: Parameters, /) -> Tensor:
        """J v."""
        ...

    def pull(self, vector: Tensor, /) -> Parameters:
        """J^T v."""
        ...


class Piece(Protocol):
    """Residuals as a function of the parameters, one that can be differentiated."""

    def __call__(self, parameters: Parameters, /) -> Tensor:
        """The residuals."""
        ...

    def about(self, at: Parameters, /) -> Tangent:
        """The function about a point."""
        ...


def gauss_newton(
    fitting: Sequence[Piece],
    judging: Sequence[Piece],
    start: Parameters,
    iterations: int,
    room: int | None = None,
) -> tuple[Parameters, float, float]:
    """Parameters one step from `start`, with the judged loss there and before; `start` itself if no step helps.

    There is `room` in memory for so many of the fitted pieces with all that they compute, for every piece if not said;
    the others are computed again and again.
    """
    before = total(judging, start)
    found, least, worse = start, before, 0
    first: Parameters | None = None
    for step in _iterates(Linearised(fitting, start, room), iterations):
        first = first or step
        moved = _sum(start, step, 1.0)
        loss = total(judging, moved)
        found, least, worse = (moved, loss, 0) if loss < least else (found, least, worse + 1)
        if worse == PATIENCE:
            break
    length = 0.5
    while first is not None and found is start and length >= SHORTEST:
        moved = _sum(start, first, length)
        loss = total(judging, moved)
        found, least = (moved, loss) if loss < before else (found, least)
        length /= 2
    return found, least, before


def total(pieces: Sequence[Piece], parameters: Parameters) -> float:
    """The sum of squared residuals."""
    with torch.no_grad():
        return float(sum(piece(parameters).square().sum(dtype=torch.float64) for piece in pieces))


class Linearised:
    """The pieces about one point; those there is `room` for stay in memory, the others are computed when needed."""

    def __init__(self, pieces: Sequence[Piece], at: Parameters, room: int | None = None) -> None:
        self._pieces, self._at = pieces, at
        self._room = len(pieces) if room is None else room
        self._kept: dict[int, Tangent] = {}
        self.residuals = [self._tangent(number).residual.detach() for number in range(len(pieces))]

    def pulled(self, vectors: Sequence[Tensor]) -> Parameters:
        """Σ J^T v, a vector per piece."""
        return _added([self._tangent(number).pull(vector) for number, vector in enumerate(vectors)])

    def curvature(self, direction: Parameters) -> Parameters:
        """Σ J^T J times `direction`."""
        return _added([self._curved(number, direction) for number in range(len(self._pieces))])

    def _curved(self, number: int, direction: Parameters) -> Parameters:
        tangent = self._tangent(number)
        return tangent.pull(tangent.push(direction))

    def _tangent(self, number: int) -> Tangent:
        if number in self._kept:
            return self._kept[number]
        tangent = self._pieces[number].about(self._at)
        if number < self._room:
            self._kept[number] = tangent
        return tangent


def _iterates(problem: Linearised, iterations: int) -> Iterator[Parameters]:
    left = tuple(-part for part in problem.pulled(problem.residuals))
    found = tuple(torch.zeros_like(part) for part in left)
    direction, size, damping = left, _dot(left, left), torch.zeros(())
    for number in range(iterations):
        if not float(size) > 0:
            break
        curved = problem.curvature(direction)
        if number == 0:
            damping = DAMPING * _dot(direction, curved) / size
        curved = _sum(curved, direction, damping)
        length = size / _dot(direction, curved)
        found, left = _sum(found, direction, length), _sum(left, curved, -length)
        yield found
        smaller = _dot(left, left)
        direction, size = _sum(left, direction, smaller / size), smaller


def _dot(left: Parameters, right: Parameters) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(left, right, strict=True)]).sum()


def _sum(left: Parameters, right: Parameters, factor: Tensor | float) -> Parameters:
    return tuple(a + factor * b for a, b in zip(left, right, strict=True))


def _added(parts: Sequence[Parameters]) -> Parameters:
    return tuple(torch.stack(same).sum(0) for same in zip(*parts, strict=True))
