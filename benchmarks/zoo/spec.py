"""A network of a suite: how to build it, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.zoo.randomise import randomise
from benchmarks.zoo.reading import Batch, Reads, call

SEED = 0
# Samples that batch norms see first. With two, of small images, channels that hardly vary between them are scaled up
# until a deep network explodes on others.
SETTLING = 8


@dataclass(frozen=True, slots=True)
class Spec:
    """A network: its constructor, what it reads, and what must not lose outputs.

    Layers of `classes` outputs, and those named in `heads`, give the answer. `size` is the side of its images, where it
    reads some. `library` is the module that the constructor imports.
    Network and inputs are drawn on the CPU, so that they are the same everywhere, and lie on `device`.
    """

    factory: Callable[[], nn.Module]
    reads: Reads
    classes: int = 1000
    heads: tuple[str, ...] = ()
    size: int | None = None
    library: str = "torch"
    device: str = "cpu"

    def build(self) -> nn.Module:
        """The network in eval mode, the same at every call, with nothing left at zero or one."""
        torch.manual_seed(SEED)
        model, example = self.factory(), self._drawn(SETTLING, SEED)
        return randomise(model, lambda: call(model, example), SEED).to(self.device)

    def example(self, samples: int, seed: int = SEED) -> Batch:
        """Random inputs for one call."""
        found: Batch = tree_map_only(Tensor, lambda tensor: tensor.to(self.device), self._drawn(samples, seed))
        return found

    def batches(self, samples: int, of: int, seed: int = SEED) -> list[Any]:
        """Random inputs for several calls, `samples` in all."""
        sizes = [min(of, samples - start) for start in range(0, samples, of)]
        return [self.example(size, seed + number) for number, size in enumerate(sizes)]

    def _drawn(self, samples: int, seed: int) -> Batch:
        return self.reads(samples, torch.Generator().manual_seed(seed))
