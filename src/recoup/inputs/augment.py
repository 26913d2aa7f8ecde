"""Variations of calibration images: there are never enough, and a network knows those it was trained on by heart."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recoup.inputs.batches import Inputs

Augment = Literal["none", "flip", "crop"]

# An image is shifted by up to this share of its side, zeros coming in, and keeps at least this share in a blend.
SHIFT = 1 / 8
OWN_SHARE = 0.5


def augmented(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Every image mirrored or not, shifted, and blended with another; other real values are only blended."""
    size = inputs.size

    def vary(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or tensor.shape[0] != size:
            return tensor
        return _blended(_moved(tensor, generator) if tensor.dim() == 4 else tensor, generator)

    return inputs.map(vary)


def varied(inputs: Inputs, kind: Augment, generator: torch.Generator) -> Inputs:
    """The images (n, C, H, W) among the inputs flipped or not, or shifted by up to 1/8 of their sides too ("crop")."""
    size = inputs.size

    def vary(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() != 4 or tensor.shape[0] != size:
            return tensor
        return _moved(tensor, generator) if kind == "crop" else _mirrored(tensor, generator)

    return inputs if kind == "none" else inputs.map(vary)


def _mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    is_mirrored = _random(len(images), images, generator) < 0.5
    return torch.where(is_mirrored[:, None, None, None], images.flip(3), images)


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images (n, C, H, W), each at a place of its own and every second one mirrored."""
    n, channels, *sides = images.shape
    borders = [round(side * SHIFT) for side in sides]
    padded = F.pad(images, [border for border in reversed(borders) for _ in range(2)])
    is_mirrored = _random(n, images, generator) < 0.5
    places = []
    for border, side in zip(borders, sides, strict=True):
        offsets = (_random(n, images, generator) * (2 * border + 1)).long()
        places.append(offsets[:, None] + torch.arange(side, device=images.device))
    rows, columns = places
    columns = torch.where(is_mirrored[:, None], columns.flip(1), columns)
    every = torch.arange(n, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[every, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _blended(values: Tensor, generator: torch.Generator) -> Tensor:
    share = _random(len(values), values, generator) * (1 - OWN_SHARE)
    share = share.reshape(-1, *[1] * (values.dim() - 1)).to(values.dtype)
    return (1 - share) * values + share * values.roll(1, dims=0)


def _random(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device).to(like.device)
