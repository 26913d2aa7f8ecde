"""Slow, obvious twins of fast code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def loss(G: Tensor, W: Tensor, rows: Tensor) -> float:
    """tr(W^T G W) - tr(Q_S^T G_SS^-1 Q_S): the error left when only `rows` are kept and compensated."""
    Q = G @ W
    total = (W * Q).sum()
    if not len(rows):
        return float(total)
    return float(total - (Q[rows] * torch.linalg.solve(G[rows][:, rows], Q[rows])).sum())


def rows_of(channel_of: Tensor, channels: list[int]) -> Tensor:
    """Rows of these channels, and the rows that belong to none."""
    return torch.isin(channel_of, torch.tensor([-1, *channels])).nonzero().squeeze(1)


def greedy_by_brute_force(layers: list[tuple[Tensor, Tensor, Tensor]], width: int, *, forward: bool) -> list[int]:
    """The greedy order, best first, by solving every candidate from scratch."""

    def total(kept: list[int]) -> float:
        return sum(loss(G, W, rows_of(c, kept)) / loss(G, W, torch.zeros(0).long()) for G, W, c in layers)

    kept = [] if forward else list(range(width))
    order: list[int] = []
    for _ in range(width):
        if forward:
            pick = min((j for j in range(width) if j not in kept), key=lambda j: total([*kept, j]))
            kept.append(pick)
        else:
            pick = min(kept, key=lambda j: total([k for k in kept if k != j]))
            kept.remove(pick)
        order.append(pick)
    return order if forward else order[::-1]


def unfolded(x: Tensor, conv: nn.Module) -> Tensor:
    """Patches (b · positions, C · K) of a convolution, by convolving with every unit vector."""
    C, kernel = x.shape[1], conv.weight.shape[2:]
    K = kernel.numel()
    units = torch.eye(C * K, dtype=x.dtype).view(C * K, C, *kernel)
    patches = conv._conv_forward(x, units, None)
    return patches.flatten(2).transpose(1, 2).flatten(0, 1)


def weighted_moments(X: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and covariance by definition."""
    mean = (w[:, None] * X).sum(0) / w.sum()
    centred = X - mean
    return mean, (w[:, None] * centred).T @ centred / w.sum()


def least_squares(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias of the regression of Y on X, from the raw rows."""
    design = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
    solution = torch.linalg.lstsq(design, Y, driver="gelsd").solution
    return solution[:-1], solution[-1]


def weighted_least_squares(X: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (d,) and bias of the regression of one output on X, every row counting by its weight."""
    root = w.sqrt()[:, None]
    design = torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], dim=1)
    solution = torch.linalg.lstsq(root * design, root * y[:, None], driver="gelsd").solution[:, 0]
    return solution[:-1], solution[-1]


def records_of(model: nn.Module, name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Input and output of a module while the model runs."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = model.get_submodule(name).register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        model(*batch) if isinstance(batch, tuple) else model(batch)
    handle.remove()
    return torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])


__all__ = [
    "greedy_by_brute_force",
    "least_squares",
    "loss",
    "records_of",
    "rows_of",
    "unfolded",
    "weighted_least_squares",
    "weighted_moments",
]
