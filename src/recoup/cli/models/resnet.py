"""ResNet-20 and ResNet-56 for CIFAR, whose shortcuts have no parameters.

Where a stage begins, the skip path takes every second pixel and pads the new channels with zeros, half in front and
half behind. State-dict keys are `conv1`, `bn1`, `layer1.0.conv1`, ..., `linear`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STAGE_WIDTHS = (16, 32, 64)
"""Channels of the three stages."""


class PaddedBlock(nn.Module):
    """Two 3x3 convolutions added to their input, which is subsampled and zero-padded where the width doubles."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride
        self.padding = (width - channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to (n, width, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))


class CifarResNet(nn.Module):
    """A stem, three stages of residual blocks, global average pooling and a linear layer."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        first, second, third = STAGE_WIDTHS
        self.conv1 = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.layer1 = _stage(first, first, blocks, stride=1)
        self.layer2 = _stage(first, second, blocks, stride=2)
        self.layer3 = _stage(second, third, blocks, stride=2)
        self.linear = nn.Linear(third, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, 32, 32) to class scores (n, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


def resnet20(classes: int = 10) -> CifarResNet:
    """ResNet-20 for 32 pixel colour images, with fresh weights: three blocks per stage."""
    return CifarResNet(3, classes)


def resnet56(classes: int = 10) -> CifarResNet:
    """ResNet-56 for 32 pixel colour images, with fresh weights: nine blocks per stage."""
    return CifarResNet(9, classes)


def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = PaddedBlock(channels, width, stride)
    return nn.Sequential(first, *(PaddedBlock(width, width, 1) for _ in range(blocks - 1)))
