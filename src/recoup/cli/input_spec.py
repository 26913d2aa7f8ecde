"""What a model expects to be fed: the shape of one image and the normalisation its pixels go through.

Images arrive as values in [0, 1]; `InputSpec.normalise` turns them into what the network was trained on,
`(x - mean) / std` channel by channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.errors import UsageError


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The input of a model: `shape` of one image (channels, height, width), `mean` and `std` per channel.

    A language model reads blocks of tokens of that shape, from so many different `tokens`; otherwise that is 0.

    >>> InputSpec((1, 8, 8), (0.5,), (0.25,)).normalise(torch.ones(1, 1, 8, 8)).max().item()
    2.0
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens: int = 0

    def __post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise UsageError(
                f"Input shape {self.shape} is not usable: every size must be at least 1, as in (3, 32, 32)."
            )
        if len(self.mean) != self.shape[0] or len(self.std) != self.shape[0]:
            raise UsageError(
                f"Input shape {self.shape} has {self.shape[0]} channels, but there are {len(self.mean)} means and "
                f"{len(self.std)} deviations. Give one of each per channel."
            )
        if any(deviation <= 0 for deviation in self.std):
            raise UsageError(f"Input deviations {self.std} must all be above zero, since images are divided by them.")

    def normalise(self, images: Tensor) -> Tensor:
        """`(images - mean) / std` per channel, for images (n, channels, ...) with values in [0, 1]."""
        per_channel = (-1, *[1] * (len(self.shape) - 1))
        mean = torch.tensor(self.mean, dtype=images.dtype, device=images.device).view(per_channel)
        std = torch.tensor(self.std, dtype=images.dtype, device=images.device).view(per_channel)
        return (images - mean) / std


def unnormalised(shape: tuple[int, ...], tokens: int = 0) -> InputSpec:
    """The input of a model that takes images in [0, 1], or tokens, as they are."""
    channels = shape[0] if shape else 0
    return InputSpec(shape, (0.0,) * channels, (1.0,) * channels, tokens)


CIFAR = InputSpec((3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""32 pixel colour images with the mean and deviation of the CIFAR-10 training set."""

IMAGENET = InputSpec((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""224 pixel colour images with the mean and deviation used for ImageNet."""
