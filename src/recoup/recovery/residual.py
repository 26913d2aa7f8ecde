"""What leaves a segment, less what should, relative to its spread: a piece of a least-squares problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recoup.algebra.gauss_newton import Parameters
from recoup.graph.runner import Watcher
from recoup.recovery.tape import Tape

# Runs a segment with changes to its tensors, watched if wanted.
Run: TypeAlias = Callable[[Parameters, Watcher | None], Mapping[str, Any]]
# What changes add to the tensors of a segment, by name.
Moves: TypeAlias = Callable[[Parameters], Mapping[str, Tensor]]


class Residual:
    """The error of one batch as a function of changes: `targets` are what should leave the segment."""

    def __init__(self, run: Run, moves: Moves, targets: Mapping[str, Tensor]) -> None:
        self._run, self.moves, self._targets = run, moves, targets
        self._scales = {name: _spread(value) for name, value in targets.items()}

    def __call__(self, changes: Parameters, watch: Watcher | None = None) -> Tensor:
        """The residuals with these changes."""
        exits = self._run(changes, watch)
        return self.joined({name: wide(exits[name]) - target for name, target in self._targets.items()})

    def about(self, at: Parameters) -> Recorded:
        """The residuals with these changes, and with any a little different."""
        return Recorded(self, at)

    def joined(self, errors: Mapping[str, Tensor]) -> Tensor:
        """Errors of what leaves the segment as residuals; one that is not there is none."""
        scaled = [self._scaled(name, errors.get(name)) for name in self._targets]
        return scaled[0] if len(scaled) == 1 else torch.cat([error.flatten() for error in scaled])

    def _scaled(self, name: str, error: Tensor | None) -> Tensor:
        if error is None:
            return torch.zeros_like(wide(self._targets[name]))
        return wide(error) / self._scales[name]


class Recorded:
    """A residual about one point: a run of its segment that is kept, to be followed forwards and backwards."""

    def __init__(self, piece: Residual, at: Parameters) -> None:
        self._piece, self._tape = piece, Tape(piece.moves(at))
        self._at = tuple(part.detach().requires_grad_() for part in at)
        with torch.enable_grad():
            self.residual = piece(self._at, self._tape)

    def push(self, direction: Parameters) -> Tensor:
        """How the residuals move with the changes."""
        with torch.no_grad():
            moves = self._tape.push(self._piece.moves(direction))
            return self._piece.joined(moves)

    def pull(self, vector: Tensor) -> Parameters:
        """How a weighted sum of the residuals grows with each change."""
        grown = torch.autograd.grad(self.residual, self._at, vector, retain_graph=True, allow_unused=True)
        return tuple(
            torch.zeros_like(part) if slope is None else slope for part, slope in zip(self._at, grown, strict=True)
        )


def wide(value: Tensor) -> Tensor:
    """With the precision of float32 at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _spread(value: Tensor) -> float:
    """What makes the squared residual of a value its error relative to its variance, for one sample."""
    value = value.double()  # squares of float16 would soon be infinite
    centred = value - (value.mean(dim=0, keepdim=True) if len(value) > 1 else value.mean())
    return max(math.sqrt(float(centred.square().sum()) / max(1, len(value))), 1e-12)
