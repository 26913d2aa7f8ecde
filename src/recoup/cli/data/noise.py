"""Standard normal noise in the shape of the model's input, for pruning without any data.

Every image has its own random stream, named by the seed and its number, so it is the same whatever batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recoup.cli.data.spec import DataSpec
from recoup.cli.input_spec import InputSpec
from recoup.errors import UsageError

DEFAULT_COUNT = 1024
"""How many images `noise` stands for."""

MOST = 10_000_000
"""More would not even be counted in memory."""


@dataclass(frozen=True, slots=True)
class Noise:
    """`count` images of N(0, 1) values, made when they are asked for; already in normalised space.

    Where the model reads `tokens`, they are drawn from so many different ones.
    """

    count: int
    shape: tuple[int, ...]
    seed: int
    tokens: int = 0

    @property
    def name(self) -> str:
        """What to call these images in a report."""
        return f"noise:{self.count}"

    @property
    def labels(self) -> None:
        """Noise shows nothing, so it has no labels."""
        return

    def images(self, rows: Tensor) -> Tensor:
        """The noise images of the given rows."""
        return torch.stack([self._image(row) for row in rows.tolist()])

    def _image(self, row: int) -> Tensor:
        stream = np.random.default_rng((self.seed, row))
        if self.tokens:
            return torch.from_numpy(stream.integers(self.tokens, size=self.shape))
        return torch.from_numpy(stream.standard_normal(self.shape, dtype=np.float32))


def open_noise(spec: DataSpec, input: InputSpec, seed: int) -> Noise:
    """As many noise images as `noise:N` asks for."""
    count = spec.place or str(DEFAULT_COUNT)
    if not count.isdecimal() or len(count) > len(str(MOST)) or not 1 <= int(count) <= MOST:
        raise UsageError(
            f"'{spec.text[:40]}': '{count[:20]}' is not a number of images from 1 to {MOST:,}. Write noise:N, such as "
            "noise:1024."
        )
    return Noise(int(count), input.shape, seed, input.tokens)
