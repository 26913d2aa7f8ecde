"""Random values wherever a fresh network has a constant: what is zero or one hides a wrong index from the proof."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Small enough that a deep network stays finite, large enough to be seen.
NOISE = 0.2
VARIANCES = (0.5, 1.5)
# Share of the mean variance that every channel has: one that hardly varies here may do so on other inputs.
FLOOR = 0.1


@torch.no_grad()
def randomise(model: nn.Module, run: Callable[[], object], seed: int) -> nn.Module:
    """`model` itself in eval mode, with noise on constant parameters and on the statistics its batch norms see.

    `run` is a forward pass of the model.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if _is_constant(parameter):
            parameter.add_(_uniform(parameter, (-NOISE, NOISE), generator))
    _settle(model.eval(), run, generator)
    return model


def _is_constant(tensor: Tensor) -> bool:
    """Whether all elements are one number: zero biases, unit scales, layer scales of 1e-6."""
    return tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _settle(model: nn.Module, run: Callable[[], object], generator: torch.Generator) -> None:
    """Give batch norms the statistics of one batch, with noise: with those of a fresh network, deep ones forget.

    Noise is in units of the spread, and each norm sees what those before it make with theirs: deep networks would
    explode otherwise.
    """

    def settle(norm: nn.modules.batchnorm._BatchNorm, args: tuple[Tensor, ...]) -> None:
        assert norm.running_mean is not None and norm.running_var is not None
        values = args[0].transpose(0, 1).flatten(1)
        variance, mean = torch.var_mean(values, 1, correction=0)
        variance += FLOOR * variance.mean()
        norm.running_mean.copy_(mean + _uniform(mean, (-NOISE, NOISE), generator) * variance.sqrt())
        norm.running_var.copy_(variance * _uniform(variance, VARIANCES, generator))

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    hooks = [norm.register_forward_pre_hook(settle) for norm in norms]
    if norms:
        run()
    for hook in hooks:
        hook.remove()


def _uniform(like: Tensor, limits: tuple[float, float], generator: torch.Generator) -> Tensor:
    low, high = limits
    return (low + (high - low) * torch.rand(like.shape, generator=generator)).to(like)
