"""LASSO: gates on the channels, and a price on open ones; a channel is worth the price at which its gate opens.

    M    second moments of contributions      (C, C), see `contributions`
    β    gates                                (C,), all 1 in the network as it is
    λ    price

    β(λ) = argmin  ½ (1 - β)^T M (1 - β) + λ Σ |β_c|

He et al., "Channel pruning for accelerating very deep neural networks" (arXiv 1707.06168), raise λ until enough gates
are shut. β(λ) is piecewise linear, so the whole path is followed instead, down from the λ that shuts all gates:

    on the open gates A with signs s:   β_A = M_AA^-1 (r_A - λ s),   r = M 1
    gate j opens at the λ where |r_j - M_jA β_A| reaches λ; gate i shuts where β_i = 0

A channel that is an exact combination of open ones never opens. Those that never do come last.

Slow twin: `gates_by_coordinate_descent` in tests/oracles.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection.contributions import contributions
from recoup.algebra.selection.problem import Problem, Ranking

# A channel of which so little is left beside the open ones is a combination of them.
DEPENDENT = 1e-10
# Two prices are the same when they differ by less than this share.
SAME = 1e-10
# Gates that shut may open again: so many events per channel end a path that goes back and forth.
MOST_EVENTS = 8


def lasso(problem: Problem) -> Ranking:
    """The gate that opens at the highest price first."""
    free, staying = problem.free.nonzero().squeeze(1), (~problem.free).nonzero().squeeze(1)
    M = contributions(problem)[free][:, free]
    # Every event decides by numbers what comes next: the path is followed on the CPU, in one piece.
    opened = opening_order(M.cpu()).to(M.device)
    return Ranking(torch.cat([staying, free[opened]]))


def opening_order(M: Tensor) -> Tensor:
    """All gates (C,) in the order in which they first open as the price falls."""
    path = _GatePath(M)
    for _ in range(MOST_EVENTS * len(M)):
        if len(path.opened) == len(M) or not path.advance():
            break
    rest = [c for c in M.diagonal().argsort(descending=True, stable=True).tolist() if c not in path.seen]
    return torch.tensor([*path.opened, *rest], dtype=torch.long)


class _GatePath:
    """The path of the gates up to the present price; `inverse` is M_AA^-1 of the open gates A."""

    def __init__(self, M: Tensor) -> None:
        self.M, self.target = M, M.sum(dim=1)
        self.price = float(self.target.abs().max()) if len(M) else 0.0
        self.opened: list[int] = []
        self.seen: set[int] = set()
        self._least = SAME * self.price
        self._active: list[int] = []
        self._signs = M.new_zeros(0)
        self._inverse = M.new_zeros(0, 0)
        self._useless = torch.zeros(len(M), dtype=torch.bool)
        self._shut_last: int | None = None

    def advance(self) -> bool:
        """Lower the price to where the next gate opens or shuts; whether there is such a price."""
        active = torch.tensor(self._active, dtype=torch.long)
        at_zero, slope = self._inverse @ self.target[active], self._inverse @ self._signs
        opening, sign = self._openings(active, at_zero, slope)
        shutting = self._below(torch.where(slope != 0, at_zero / slope, torch.nan), strictly=True)
        best_open, best_shut = _largest(opening), _largest(shutting)
        price = max(best_open[0], best_shut[0])
        if not price > self._least:
            return False
        self.price = price
        if best_shut[0] > best_open[0]:
            self._shut(best_shut[1])
        else:
            self._open(best_open[1], float(sign[best_open[1]]))
        return True

    def _openings(self, active: Tensor, at_zero: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """The price at which every shut gate opens (nan: none below), and the sign that it opens with."""
        spread = self.M.new_zeros(len(self.M), 2)  # a product with all of M is cheaper than a copy of its columns
        spread[active] = torch.stack([at_zero, slope], dim=1)
        explained, rise = (self.M @ spread).T
        level = self.target - explained
        positive, negative = self._below(level / (1 - rise)), self._below(-level / (1 + rise))
        opening = torch.fmax(positive, negative)
        opening[active] = torch.nan
        opening[self._useless] = torch.nan
        if self._shut_last is not None:  # it lies on the border, and goes inside
            last = self._shut_last
            opening[last] = opening[last] if float(opening[last]) < self.price * (1 - SAME) else torch.nan
        return opening, torch.where(negative > positive.nan_to_num(-torch.inf), -1.0, 1.0)

    def _below(self, prices: Tensor, *, strictly: bool = False) -> Tensor:
        most = self.price * (1 - SAME if strictly else 1 + SAME)
        return torch.where((prices > 0) & (prices <= most), prices.clamp(max=self.price), torch.nan)

    def _open(self, gate: int, sign: float) -> None:
        column = self.M[self._active, gate]
        along = self._inverse @ column
        left = float(self.M[gate, gate] - column @ along)
        self._shut_last = None
        if left <= DEPENDENT * float(self.M[gate, gate]):
            self._useless[gate] = True
            return
        border = -along[:, None] / left
        top = torch.cat([self._inverse + torch.outer(along, along) / left, border], dim=1)
        self._inverse = torch.cat([top, torch.cat([border.T, border.new_full((1, 1), 1 / left)], dim=1)])
        self._active.append(gate)
        self._signs = torch.cat([self._signs, self._signs.new_full((1,), sign)])
        if gate not in self.seen:
            self.seen.add(gate)
            self.opened.append(gate)

    def _shut(self, place: int) -> None:
        others = [k for k in range(len(self._active)) if k != place]
        column = self._inverse[others, place]
        kept = self._inverse[others][:, others]
        self._inverse = kept - torch.outer(column, column) / self._inverse[place, place]
        self._signs = self._signs[others]
        self._shut_last = self._active.pop(place)
        self._useless[:] = False  # what depended on the gate may be of use again


def _largest(prices: Tensor) -> tuple[float, int]:
    if not len(prices) or bool(prices.isnan().all()):
        return -1.0, -1
    place = int(prices.nan_to_num(-torch.inf).argmax())
    return float(prices[place]), place
