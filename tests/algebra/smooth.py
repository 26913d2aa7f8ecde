"""Pieces of least-squares problems from plain functions, differentiated by torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.func import jvp, vjp

from recoup.algebra.gauss_newton import Parameters


class Smooth:
    """Residuals given by a function."""

    def __init__(self, function: Callable[[Parameters], Tensor]) -> None:
        self._function = function

    def __call__(self, parameters: Parameters) -> Tensor:
        return self._function(parameters)

    def about(self, at: Parameters) -> SmoothAbout:
        return SmoothAbout(self._function, at)


class SmoothAbout:
    """The function about one point."""

    def __init__(self, function: Callable[[Parameters], Tensor], at: Parameters) -> None:
        self._function, self._at = function, at
        self.residual, self._pull = vjp(function, at)

    def push(self, direction: Parameters) -> Tensor:
        return jvp(self._function, (self._at,), (direction,))[1]

    def pull(self, vector: Tensor) -> Parameters:
        return self._pull(vector)[0]
