"""Slow, obvious twins of fast code."""

from __future__ import annotations

import copy
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


def thinet_from_rows(rows: list[tuple[Tensor, Tensor, Tensor]], width: int) -> list[int]:
    """ThiNet's order, best first, from raw inputs (n, d), weights (d, N) and the channel of each row."""

    def parts(X: Tensor, W: Tensor, channel_of: Tensor) -> Tensor:
        found = [X[:, channel_of == c] @ W[channel_of == c] for c in range(width)]  # each (n, N)
        whole = sum(found).square().sum().sqrt()
        return torch.stack(found) / whole

    contributed = [parts(*layer) for layer in rows]
    removed: list[int] = []
    for _ in range(width):
        left = [c for c in range(width) if c not in removed]
        cost = {c: sum(float(p[[*removed, c]].sum(0).square().sum()) for p in contributed) for c in left}
        removed.append(min(left, key=cost.__getitem__))
    return removed[::-1]


def gates_by_coordinate_descent(M: Tensor, price: float, sweeps: int = 3000) -> Tensor:
    """argmin ½ (1 - β)^T M (1 - β) + price · Σ |β|, one gate at a time until nothing changes."""
    beta = torch.zeros(len(M), dtype=M.dtype)
    target = M.sum(dim=1)
    for _ in range(sweeps):
        before = beta.clone()
        for c in range(len(M)):
            rest = float(target[c] - M[c] @ beta + M[c, c] * beta[c])
            beta[c] = max(abs(rest) - price, 0.0) * (1 if rest > 0 else -1) / M[c, c]
        if float((beta - before).abs().max()) < 1e-13:
            break
    return beta


def costs_of_single_channels(layers: list[tuple[Tensor, Tensor, Tensor]], width: int) -> list[float]:
    """What it costs to lose each channel alone, the others compensated by solving from scratch."""

    def cost(c: int) -> float:
        kept = [k for k in range(width) if k != c]
        return sum(loss(G, W, rows_of(of, kept)) / loss(G, W, torch.zeros(0).long()) for G, W, of in layers)

    return [cost(c) for c in range(width)]


def flow_by_definition(model: nn.Module, batch: Tensor, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Input of each named module, and the derivative of the summed outputs through that module alone, as they are.

    In a float64 copy with absolute weights, no biases, batch norms as factors and no activations.
    """
    twin = copy.deepcopy(model).double().eval()
    for module in twin.modules():
        for part, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, part, _Factor(child))
            if isinstance(child, nn.ReLU):
                setattr(module, part, nn.Identity())
    for parameter_name, parameter in twin.named_parameters():
        parameter.data = parameter.data.abs() if parameter_name.endswith("weight") else 0 * parameter.data
    read: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            read[name] = args[0].clone()
            return (read[name],)

        return hook

    for name in names:
        twin.get_submodule(name).register_forward_pre_hook(keep(name))
    ones = torch.ones(1, *batch.shape[1:], dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.grad(twin(ones).sum(), [read[name] for name in names])
    return {name: (read[name].detach(), slope) for name, slope in zip(names, slopes, strict=True)}


class _Factor(nn.Module):
    """What a batch norm multiplies by, absolute."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.factor = (norm.weight.data.abs() / (norm.running_var + norm.eps).sqrt()).double()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.view(1, -1, *[1] * (x.dim() - 2))


__all__ = [
    "costs_of_single_channels",
    "flow_by_definition",
    "gates_by_coordinate_descent",
    "greedy_by_brute_force",
    "least_squares",
    "loss",
    "records_of",
    "rows_of",
    "thinet_from_rows",
    "unfolded",
    "weighted_least_squares",
    "weighted_moments",
]  # fmt: skip
