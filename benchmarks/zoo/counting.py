"""Run a model and see what it returns and what it costs; one counter for both sides.

MACs are those of convolutions and matrix products, attention included, as torch's FlopCounterMode sees them while the
model runs. LSTM cells are one operation to it on a CPU, and count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.zoo.reading import Batch, call

SAMPLES = 3  # neither the one that is traced with, nor the two of the proof


@dataclass(frozen=True, slots=True)
class Observed:
    """Shapes of all returned tensors, and multiply-accumulates of one sample, in all and by operation."""

    shapes: tuple[tuple[int, ...], ...]
    macs: int
    by_operation: dict[str, int]


def observe(model: nn.Module, batch: Batch, samples: int) -> Observed:
    """What one forward pass returns and costs."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # fused attention hides its products from the counter
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # the counter cannot follow views of parameters that want a gradient
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            outputs = call(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for parameter in trained:
            parameter.requires_grad_(True)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors_of(outputs))
    by_operation = {str(name): flops // 2 // samples for name, flops in counter.get_flop_counts()["Global"].items()}
    return Observed(shapes, counter.get_total_flops() // 2 // samples, by_operation)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Every tensor in what a model returns."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
