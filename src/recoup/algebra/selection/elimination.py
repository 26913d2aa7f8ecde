"""The recursion that forward selection and backward elimination share, O(d³) for the whole order of a layer.

    A   (d, d) symmetric: forward the covariance given the chosen rows, backward the precision of the kept rows
    B   (d, N) right-hand sides: forward covariance with the target, backward the compensated weights
    J   rows of one channel (r of them)

    score_J = tr(B_J^T A_JJ^-1 B_J)                     forward: the gain of choosing J; backward: the cost of losing J
    take J:  A -= A_:J A_JJ^-1 A_J:,   B -= A_:J A_JJ^-1 B_J

A whole update of A per step would be bound by memory traffic. Updates are therefore collected in a panel,
A = A₀ - U U^T and B = B₀ - U T, and only what scores need, the diagonal blocks of A and of B B^T, is kept current;
a full panel is applied at once by matrix products. Slow twin: `greedy_by_brute_force` in tests/oracles.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.linalg import block_factors, factorise

# Columns collected before A and B are updated: wide enough for the products to be bound by arithmetic.
PANEL = 256


class Elimination:
    """The state of one layer's recursion. `A` and `B` are taken over and overwritten."""

    def __init__(self, A: Tensor, B: Tensor, rows: Tensor, present: Tensor, singular: float) -> None:
        """Rows (width, r) of every channel; `present` (width, r) is false where a channel has fewer than r rows.

        A channel is unusable once `singular` or less of a diagonal entry of its block of A is left.
        """
        self._A, self._B, self._singular = A, B, singular
        self._rows, self._present = rows, present.to(A.dtype)
        self._pairs = self._present[:, :, None] * self._present[:, None, :]
        self._missing = torch.diag_embed(1 - self._present)
        r = rows.shape[1]
        self._identity = torch.eye(r, dtype=A.dtype, device=A.device).expand(len(rows), r, r)
        self._inverse_lower = self._identity
        self._U = A.new_zeros(A.shape[0], max(PANEL, r))
        self._T = B.new_zeros(max(PANEL, r), B.shape[1])
        self._filled = 0
        self._blocks, self._energies = self._fresh_blocks()
        self._scale = self._blocks.diagonal(dim1=1, dim2=2).clone()

    def scores(self) -> Tensor:
        """tr(B_J^T A_JJ^-1 B_J) of every channel (width,); nan where A_JJ is singular."""
        lower, definite = block_factors(self._blocks)
        left = (lower.diagonal(dim1=1, dim2=2).square() / self._scale).amin(dim=1)
        usable = definite & (left > self._singular)
        # r is small: one inverse of the factors serves the scores now and the update of the channel that is taken.
        self._inverse_lower = torch.linalg.solve_triangular(lower, self._identity, upper=False)
        inverse = self._inverse_lower.mT @ self._inverse_lower
        return torch.where(usable, (inverse * self._energies).sum(dim=(1, 2)).clamp(min=0), torch.nan)

    def take(self, channel: int) -> None:
        """Eliminate a channel that `scores` has just found usable."""
        rows, present = self._rows[channel], self._present[channel]
        inverse_lower = self._inverse_lower[channel] * present
        U, T = self._U[:, : self._filled], self._T[: self._filled]
        u = (self._A[:, rows] - U @ U[rows].T) @ inverse_lower.T
        t = inverse_lower @ (self._B[rows] - U[rows] @ T)
        self._update_blocks(u, t)
        end = self._filled + len(rows)
        self._U[:, self._filled : end], self._T[self._filled : end] = u, t
        self._filled = end
        if end + len(rows) > self._U.shape[1]:
            self._apply_panel()

    def take_rows(self, rows: Tensor, name: str) -> None:
        """Eliminate any set of rows at once: those of inputs that stay whatever is chosen."""
        if not rows.numel():
            return
        factor = factorise(self._A[rows][:, rows], name)
        u = torch.linalg.solve_triangular(factor.lower, self._A[rows], upper=False).T
        t = torch.linalg.solve_triangular(factor.lower, self._B[rows], upper=False)
        self._A -= u @ u.T
        self._B -= u @ t
        self._blocks, self._energies = self._fresh_blocks()

    def _update_blocks(self, u: Tensor, t: Tensor) -> None:
        U, T = self._U[:, : self._filled], self._T[: self._filled]
        cross = self._B @ t.T - U @ (T @ t.T)  # B t^T before the update (d, r)
        u_of, cross_of = u[self._rows] * self._present[:, :, None], cross[self._rows] * self._present[:, :, None]
        mixed = cross_of @ u_of.mT
        self._blocks = self._blocks - u_of @ u_of.mT
        self._energies = self._energies - mixed - mixed.mT + u_of @ (t @ t.T) @ u_of.mT

    def _apply_panel(self) -> None:
        U, T = self._U[:, : self._filled], self._T[: self._filled]
        self._A.addmm_(U, U.T, alpha=-1)
        self._B.addmm_(U, T, alpha=-1)
        self._filled = 0
        self._blocks, self._energies = self._fresh_blocks()

    def _fresh_blocks(self) -> tuple[Tensor, Tensor]:
        """Diagonal blocks of A and of B B^T from scratch, so that rounding does not pile up over the whole order."""
        blocks = self._A[self._rows[:, :, None], self._rows[:, None, :]]
        of_channel = self._B[self._rows] * self._present[:, :, None]
        return blocks * self._pairs + self._missing, of_channel @ of_channel.mT


def rows_by_channel(channel_of: Tensor, width: int, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers of every channel (width, r) and which of them are real (width, r); r = rows of the largest one."""
    inside = (channel_of >= 0) & usable
    rows = inside.nonzero().squeeze(1)
    owner, by_owner = channel_of[rows].sort(stable=True)
    rows = rows[by_owner]
    counts = torch.bincount(owner, minlength=width)
    slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owner]
    table = rows.new_zeros(width, max(1, int(counts.max()) if len(rows) else 1))
    present = torch.zeros_like(table, dtype=torch.bool)
    table[owner, slot] = rows
    present[owner, slot] = True
    return table, present
