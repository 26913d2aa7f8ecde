"""Compensation-aware selection: forward (the paper's CaP) and backward, on one shared recursion.

Several layers that read the same channels are served together: their scores, each relative to the variance of its
own output, add up (a residual stream has one set of channels for all its readers).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recoup.algebra.cuda_graph import RecordedStep, Values
from recoup.algebra.linalg import SINGULAR, add_ridge, factorise, independent_rows, live_rows, narrow_factor
from recoup.algebra.selection.elimination import Elimination, rows_by_channel
from recoup.algebra.selection.problem import Layer, Problem, Ranking, output_variance

# Stands for the score of a channel that no layer can use: below every real one, above those already taken.
UNUSABLE = torch.finfo(torch.float64).min


def forward(problem: Problem) -> Ranking:
    """Grow the kept set by the channel that lowers the compensated error most.

    A channel that is constant, or an exact combination of the chosen ones, is never chosen: it comes last. Without a
    ridge the ranking says how many can be chosen at all.
    """
    prepared = [_prepare_forward(layer, problem) for layer in problem.layers]
    order, gains, usable = _sweep(prepared, problem, sign=1)
    left = _error_left(gains)
    if problem.ridge > 0:
        return _ranking(problem, order, left)
    never = ~(usable & _varies(problem)[order])  # none of them adds to the gains, so their order is free
    ranking = _ranking(problem, order[never.long().argsort(stable=True)], left)
    return replace(ranking, most=problem.width - int(never.sum()))


def backward(problem: Problem) -> Ranking:
    """Shrink the kept set by the channel whose loss compensation repairs best."""
    prepared = [prepare_backward(layer, problem) for layer in problem.layers]
    order, costs, _ = _sweep(prepared, problem, sign=-1)
    lost = torch.cat([costs.new_zeros(1), costs.cumsum(0)])
    return _ranking(problem, order.flip(0), lost.flip(0))


def loss_along(problem: Problem, order: Tensor) -> Tensor:
    """The loss (width + 1,) at every width when channels are kept in a given order, as `Ranking.loss` has it.

    One forward recursion along the order, whoever it comes from: the work of `forward`.
    """
    prepared = [_prepare_forward(layer, problem) for layer in problem.layers]
    free = order[problem.free[order]]
    free, gains, _ = _sweep(prepared, problem, sign=1, given=free)
    loss = _ranking(problem, free, _error_left(gains)).loss
    assert loss is not None
    return loss


def _sweep(
    prepared: list[tuple[Elimination, float]], problem: Problem, *, sign: int, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Free channels in the order they were taken (largest `sign` · score first, or as given), and the score of each.

    The last says of each whether a layer could use it.
    """
    undecided, count = problem.free.clone(), int(problem.free.sum())
    in_turn = _InTurn(problem)
    order = torch.zeros(count, dtype=torch.long, device=problem.device)
    taken = torch.zeros(count, dtype=torch.float64, device=problem.device)
    used = torch.zeros(count, dtype=torch.bool, device=problem.device)
    place = torch.zeros(1, dtype=torch.long, device=problem.device)

    eliminations = [elimination for elimination, _ in prepared]

    def step(_: Values) -> None:
        scores = torch.stack([elimination.scores() / scale for elimination, scale in prepared])
        usable = scores.isfinite()
        total = torch.where(usable, scores, 0).sum(dim=0)
        value = torch.where(usable.any(dim=0), sign * total, UNUSABLE)
        best = torch.where(undecided & in_turn.waiting, value, -torch.inf).argmax(dim=0, keepdim=True)
        channel = best if given is None else given.index_select(0, place)
        order.index_copy_(0, place, channel)
        taken.index_copy_(0, place, total.index_select(0, channel))
        used.index_copy_(0, place, usable.any(dim=0).index_select(0, channel))
        undecided.index_fill_(0, channel, False)
        place.add_(1)
        in_turn.take(channel, place)
        for elimination, can_take in zip(eliminations, usable.index_select(1, channel), strict=True):
            elimination.take(channel, can_take)

    replay = RecordedStep(step, problem.device)
    for _ in range(count):
        replay()
        for elimination in eliminations:
            elimination.apply_full_panel()
    return order, taken, used


class _InTurn:
    """Whose turn it is, where every part has to lose or gain a channel before any does again."""

    def __init__(self, problem: Problem) -> None:
        self._parts = torch.zeros_like(problem.free, dtype=torch.long) if problem.parts is None else problem.parts
        self._count = max(1, int(self._parts.max()) + 1)
        self.waiting = torch.ones_like(problem.free)

    def take(self, channel: Tensor, taken: Tensor) -> None:
        """Note a channel (1,), after which so many (1,) have been taken."""
        is_over = taken % self._count == 0
        self.waiting.copy_(is_over | (self.waiting & (self._parts != self._parts.index_select(0, channel))))


def _error_left(gains: Tensor) -> Tensor:
    """The error after each choice, the first of them none."""
    return torch.cat([gains.new_zeros(1), gains.flip(0).cumsum(0)]).flip(0)


def _prepare_forward(layer: Layer, problem: Problem) -> tuple[Elimination, float]:
    G, _ = add_ridge(layer.covariance, problem.ridge)
    W = narrow_factor(layer.weight)
    live = live_rows(layer.covariance)
    elimination = Elimination(G, G @ W, *rows_by_channel(layer.channel_of, problem.width, live), SINGULAR)
    elimination.take_rows(_staying_rows(layer, problem, live), "inputs that stay")
    return elimination, _scale(layer)


def prepare_backward(layer: Layer, problem: Problem) -> tuple[Elimination, float]:
    """The recursion that loses channels of a layer, before the first is lost, and the scale of its costs."""
    rows = live_rows(layer.covariance).nonzero().squeeze(1)
    if not rows.numel():  # without a row that varies there is no precision, and nothing is lost or gained
        return _prepare_forward(layer, problem)
    G, _ = add_ridge(layer.covariance[rows][:, rows], problem.ridge)
    W = narrow_factor(layer.weight)[rows].clone()
    channel_of = layer.channel_of[rows]
    every = torch.ones_like(rows, dtype=torch.bool)
    precision = factorise(G, "backward elimination").inverse()
    # A precision shrinks by many orders when a near-duplicate goes: no lower limit on what is left of it.
    return Elimination(precision, W, *rows_by_channel(channel_of, problem.width, every), 0.0), _scale(layer)


def _varies(problem: Problem) -> Tensor:
    """Which channels vary where some layer reads them (width,)."""
    found = torch.zeros_like(problem.free)
    for layer in problem.layers:
        found[layer.channel_of[live_rows(layer.covariance) & (layer.channel_of >= 0)]] = True
    return found


def _staying_rows(layer: Layer, problem: Problem, live: Tensor) -> Tensor:
    stays = (layer.channel_of < 0) | ~problem.free[layer.channel_of.clamp(min=0)]
    rows = (stays & live).nonzero().squeeze(1)
    return rows if problem.ridge > 0 else rows[independent_rows(layer.covariance[rows][:, rows])]


def _scale(layer: Layer) -> float:
    """Total variance of the layer's output, by which its errors are measured, or of what it is a part of."""
    total = output_variance(layer) if layer.scale is None else layer.scale
    return total if total > 0 else 1.0


def _ranking(problem: Problem, order: Tensor, loss_of_free: Tensor) -> Ranking:
    """`loss_of_free[n]` belongs to n kept free channels; the staying ones come first and are never lost."""
    staying = (~problem.free).nonzero().squeeze(1)
    before = loss_of_free[:1].expand(len(staying))
    return Ranking(torch.cat([staying, order]), torch.cat([before, loss_of_free]))
