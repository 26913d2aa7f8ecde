"""The recursion that forward selection and backward elimination share, O(d³) for the whole order of a layer.

    A   (d, d) symmetric: forward the covariance given the chosen rows, backward the precision of the kept rows
    B   (d, N) right-hand sides: forward covariance with the target, backward the compensated weights
    J   rows of one channel (r of them)

    score_J = tr(B_J^T A_JJ^-1 B_J)                     forward: the gain of choosing J; backward: the cost of losing J
    take J:  A -= A_:J A_JJ^-1 A_J:,   B -= A_:J A_JJ^-1 B_J

A whole update of A per step would be bound by memory traffic. Updates are therefore collected in a panel,
A = A₀ - U U^T and B = B₀ - U T, and only what scores need, the diagonal blocks of A and of B B^T, is kept current;
a full panel is applied at once by matrix products. Nobody asks for channels that were taken again, so their rows go
then, and the work for a whole order is a third of what it is with all of them. What is not filled yet of a panel is
zero, so that on a GPU every step can be the same operations on the same tensors, and be replayed: there all rows stay.

Slow twin: `greedy_by_brute_force` in tests/oracles.py.
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
        self._width, self._open = len(rows), torch.arange(len(rows), device=A.device)  # channels that have rows here
        self._place = self._open.clone()  # where in the tables a channel is
        self._taken: list[Tensor] = []  # of those, what was taken since rows went the last time
        r = rows.shape[1]
        self._T = B.new_zeros(max(PANEL, r), B.shape[1])
        self._next = torch.arange(r, device=A.device)  # columns of U, rows of T, that are filled next
        self._filled = 0
        self._lay_out(rows, present)
        self._scale = self._blocks.diagonal(dim1=1, dim2=2).clone()

    def _lay_out(self, rows: Tensor, present: Tensor) -> None:
        """Tables and room for the rows that A and B have now."""
        r = rows.shape[1]
        self._rows, self._present = rows, present.to(self._A.dtype)
        self._pairs = self._present[:, :, None] * self._present[:, None, :]
        self._missing = torch.diag_embed(1 - self._present)
        self._identity = torch.eye(r, dtype=self._A.dtype, device=self._A.device).expand(len(rows), r, r)
        self._inverse_lower = torch.zeros_like(self._pairs)
        self._U = self._A.new_zeros(self._A.shape[0], max(PANEL, r))
        self._blocks, self._energies = self._fresh_blocks()

    def scores(self) -> Tensor:
        """tr(B_J^T A_JJ^-1 B_J) of every channel (width,); nan where A_JJ is singular, or was taken long ago."""
        lower, definite = block_factors(self._blocks)
        left = (lower.diagonal(dim1=1, dim2=2).square() / self._scale).amin(dim=1)
        usable = definite & (left > self._singular)
        # r is small: one inverse of the factors serves the scores now and the update of the channel that is taken.
        self._inverse_lower.copy_(torch.linalg.solve_triangular(lower, self._identity, upper=False))
        inverse = self._inverse_lower.mT @ self._inverse_lower
        found = torch.where(usable, (inverse * self._energies).sum(dim=(1, 2)).clamp(min=0), torch.nan)
        if len(found) == self._width:
            return found
        return found.new_full((self._width,), torch.nan).index_copy_(0, self._open, found)

    def take(self, channel: Tensor, usable: Tensor) -> None:
        """Eliminate a channel (1,), if `scores` has just found it usable (); `apply_full_panel` comes next."""
        place = self._place.index_select(0, channel)
        rows, present, inverse_lower = (
            table.index_select(0, place)[0] for table in (self._rows, self._present, self._inverse_lower)
        )
        inverse_lower = torch.where(usable, inverse_lower * present, 0)
        U, T = self._panel()
        u = (self._A[:, rows] - U @ U[rows].T) @ inverse_lower.T
        t = inverse_lower @ (self._B[rows] - U[rows] @ T)
        self._update_blocks(u, t)
        self._U.index_copy_(1, self._next, u)
        self._T.index_copy_(0, self._next, t)
        self._next += len(rows)
        if not self._A.is_cuda:
            self._taken.append(place)

    def apply_full_panel(self) -> None:
        """Apply the panel if the next channel would not find room there."""
        r = self._rows.shape[1]
        self._filled += r
        if self._filled + r > self._U.shape[1]:
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
        self._refresh_blocks()

    def _panel(self) -> tuple[Tensor, Tensor]:
        """What is filled of U and T; all of them on a GPU, where a step must be the same operations every time."""
        end = self._U.shape[1] if self._U.is_cuda else self._filled
        return self._U[:, :end], self._T[:end]

    def _update_blocks(self, u: Tensor, t: Tensor) -> None:
        U, T = self._panel()
        cross = self._B @ t.T - U @ (T @ t.T)  # B t^T before the update (d, r)
        u_of, cross_of = u[self._rows] * self._present[:, :, None], cross[self._rows] * self._present[:, :, None]
        mixed = cross_of @ u_of.mT
        self._blocks -= u_of @ u_of.mT
        self._energies += u_of @ (t @ t.T) @ u_of.mT - mixed - mixed.mT

    def _apply_panel(self) -> None:
        self._A.addmm_(self._U, self._U.T, alpha=-1)
        self._B.addmm_(self._U, self._T, alpha=-1)
        self._U.zero_()
        self._T.zero_()
        self._next -= self._filled
        self._filled = 0
        if self._A.is_cuda:
            self._refresh_blocks()
        else:
            self._forget_taken()

    def _forget_taken(self) -> None:
        """Only rows of channels that may still be taken stay."""
        left = torch.ones_like(self._open, dtype=torch.bool).index_fill_(0, torch.cat(self._taken), value=False)
        present, rows = self._present[left] > 0, self._rows[left]
        kept = rows[present].sort().values
        kept = kept if len(kept) else rows.new_zeros(1)  # whoever is absent reads some row, and makes nothing of it
        self._A, self._B = self._A[kept][:, kept], self._B[kept]
        rows = torch.searchsorted(kept, rows).clamp(max=len(kept) - 1)  # absent ones may be any row
        self._taken, self._open, self._scale = [], self._open[left], self._scale[left]
        self._place[self._open] = torch.arange(len(self._open), device=self._open.device)
        self._lay_out(rows, present)

    def _refresh_blocks(self) -> None:
        blocks, energies = self._fresh_blocks()
        self._blocks.copy_(blocks)
        self._energies.copy_(energies)

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
