"""Random values wherever a fresh network has a constant: what is zero or one hides a wrong index from the proof."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Small enough that a deep network stays finite, large enough to be seen.
NOISE = 0.2
VARIANCES = (0.5, 1.5)


@torch.no_grad()
def randomise(model: nn.Module, run: Callable[[], object], seed: int) -> nn.Module:
    """`model` itself in eval mode, with noise on constant parameters and on the statistics its batch norms see.

    `run` is a forward pass of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if _is_constant(parameter):
            parameter.add_(_uniform(parameter, (-NOISE, NOISE), generator))
    _settle(model.eval(), run)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(_uniform(buffer, (-NOISE, NOISE), generator))
        elif name.endswith("running_var"):
            buffer.mul_(_uniform(buffer, VARIANCES, generator))
    return model


def _is_constant(tensor: Tensor) -> bool:
    """Whether all elements are one number: zero biases, unit scales, layer scales of 1e-6."""
    return tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _settle(model: nn.Module, run: Callable[[], object]) -> None:
    """Give batch norms the statistics of one batch: with those of a fresh network, deep ones forget their inputs."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.training, norm.momentum = True, 1.0
    if norms:
        run()
    for norm, momentum in zip(norms, usual, strict=True):
        norm.training, norm.momentum = False, momentum


def _uniform(like: Tensor, limits: tuple[float, float], generator: torch.Generator) -> Tensor:
    low, high = limits
    return (low + (high - low) * torch.rand(like.shape, generator=generator)).to(like)
