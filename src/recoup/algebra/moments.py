"""Streaming weighted mean and covariance of rows, in bounded memory.

    X   rows seen so far              (n, d)
    w   weight of each row            (n,)      1 everywhere when not given
    total = Σ w,   mean = Σ w x / Σ w,   scatter = Σ w (x - mean)(x - mean)^T
    effective = (Σ w)² / Σ w²         as many rows of equal weight tell as much

Every batch is centred about its own mean before squaring, multiplied in float64 where the device is good at it and
else in float32, and added to float64 totals. The scatter is symmetric: half of it is summed. Two parts merge by the
pairwise formula of Chan, Golub and LeVeque, so the result does not depend on how the rows were cut into batches or in
which order the parts meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Compute capabilities of the data-centre GPUs that multiply float64 about as fast as float32.
FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))
# Rows of the scatter that are summed at once: few enough to leave out half of it, enough for products to be quick.
STRIP = {"cpu": 384, "cuda": 1024}
# What a row counts whose outputs are all shut: nothing beside rows that are open, and all alike where none is. Without
# it a layer that never opens would have no mean, and what it loses would not go into its bias.
SHUT = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Total weight and squared weights, mean (d,) and scatter (d, d) of the rows seen, all float64."""

    rows: int
    total: float
    squares: float
    mean: Tensor
    scatter: Tensor

    @property
    def effective(self) -> float:
        """How many rows of equal weight would tell as much: rows of weight zero tell nothing."""
        return self.total**2 / self.squares if self.squares > 0 else 0.0

    @property
    def covariance(self) -> Tensor:
        """Scatter over total weight: the weighted covariance (d, d)."""
        return self.scatter / self.total if self.total > 0 else torch.zeros_like(self.scatter)

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance (d,)."""
        diagonal = self.scatter.diagonal()
        return diagonal / self.total if self.total > 0 else torch.zeros_like(diagonal)


class Accumulator:
    """Sums rows as they come; `moments()` gives the frozen result at any time."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self._rows = 0
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._squares = torch.zeros((), dtype=torch.float64, device=device)
        self._mean = torch.zeros(width, dtype=torch.float64, device=device)
        self._scatter = torch.zeros(width, width, dtype=torch.float64, device=device)  # its upper part counts

    def update(self, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add rows (n, d) with non-negative weights (n,); rows of total weight zero change nothing."""
        rows = rows.to(product_dtype(rows))
        weights = torch.ones(len(rows), dtype=rows.dtype, device=rows.device) if weights is None else weights
        total, squares = weights.double().sum(), weights.double().square().sum()
        safe = total.clamp(min=torch.finfo(torch.float64).tiny)
        mean = (weights.to(rows.dtype) @ rows).double() / safe
        centred = rows - mean.to(rows.dtype)
        # The rounding of `mean` to the rows' precision leaves a small first moment: put it back, exactly.
        slip = (weights.to(rows.dtype) @ centred).double() / safe
        scaled = centred * weights.to(rows.dtype).sqrt()[:, None]
        for start, end in self._strips():
            strip, left, right = self._scatter[start:end, start:], scaled[:, start:end].T, scaled[:, start:]
            # In place: where a layer is wide and rows are few, passes over the scatter take longest.
            if rows.dtype == torch.float64:
                strip.addmm_(left, right)
            else:
                strip += left @ right
        self._scatter.addr_(slip * -total, slip)
        self._add(len(rows), total, squares, mean.to(rows.dtype).double() + slip)

    def _add(self, rows: int, total: Tensor, squares: Tensor, mean: Tensor) -> None:
        """All but the scatter that these rows have about their own mean, which is added already."""
        combined = (self._total + total).clamp(min=torch.finfo(torch.float64).tiny)
        shift = mean - self._mean
        self._scatter.addr_(shift * (self._total * total / combined), shift)
        self._mean += shift * (total / combined)
        self._total = self._total + total
        self._squares = self._squares + squares
        self._rows += rows

    def add(self, part: Moments) -> None:
        """Merge what another accumulator has seen."""
        device = self._mean.device
        total, squares = torch.tensor([part.total, part.squares], dtype=torch.float64, device=device)
        self._scatter += part.scatter.to(device)
        self._add(part.rows, total, squares, part.mean.to(device))

    def moments(self) -> Moments:
        """What has been seen so far; later updates do not change it."""
        total, squares, scatter = float(self._total), float(self._squares), self._scatter.clone()
        for start, end in self._strips():
            scatter[end:, start:end] = scatter[start:end, end:].T
        return Moments(self._rows, total, squares, self._mean.clone(), scatter)

    def _strips(self) -> Iterator[tuple[int, int]]:
        """Rows of the scatter, each of them summed from its own columns on: the rest is the same again."""
        size, width = STRIP["cuda" if self._scatter.is_cuda else "cpu"], len(self._mean)
        yield from ((start, min(start + size, width)) for start in range(0, width, size))


def apart(matrix: Tensor, size: int) -> Tensor:
    """A matrix (d, d) with zeros where the row and the column are not in the same run of `size`."""
    run = torch.arange(len(matrix), device=matrix.device) // size
    return torch.where(run[:, None] == run, matrix, 0.0)


def product_dtype(rows: Tensor) -> torch.dtype:
    """The precision to multiply rows in.

    Fewer rows than columns give a singular covariance; float32 products would make it indefinite, beyond what a small
    ridge repairs. Only GPUs without fast float64 (all but compute capability 8.0, 9.0, 10.0) make do with float32.
    """
    if rows.dtype == torch.float64 or not rows.is_cuda:
        return torch.float64
    return torch.float64 if torch.cuda.get_device_capability(rows.device) in FAST_FLOAT64 else torch.float32


def merge(left: Moments, right: Moments) -> Moments:
    """The moments of both sets of rows together."""
    both = Accumulator(left.mean.numel(), left.mean.device)
    both.add(left)
    both.add(right)
    return both.moments()


def sensitivity(outputs: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean over outputs of g'(y)^2, one positive weight per row (n,), for `outputs` y of shape (n, N)."""
    return squared_slopes(outputs, activation).mean(dim=1)


def squared_slopes(outputs: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """g'(y)^2 of every output (n, N).

    g = `activation` acts on each output by itself (batch norm, activation), so the gradient of its sum is g'.
    """
    with torch.enable_grad():
        y = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(activation(y.clone()).sum(), y)
    return slope.to(torch.promote_types(slope.dtype, torch.float32)).square() + SHUT
