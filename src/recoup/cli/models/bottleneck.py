"""ResNet-50 in its CIFAR form: a 3x3 stem that keeps the size, then four stages of bottleneck blocks.

State-dict keys are those of torchvision's `resnet50` (`conv1`, `layer1.0.conv1`, `layer1.0.downsample.0`, `fc`); only
the stem is smaller, and no pooling follows it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4
"""How many times wider a block's output is than its inner convolutions."""

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Inner width, number of blocks and stride of each stage."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions added to their input, which is projected where its form changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        is_same = stride == 1 and channels == out
        projection = (nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
        self.downsample = nn.Identity() if is_same else nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to (n, 4 · width, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class BottleneckResNet(nn.Module):
    """A stem, four stages of bottleneck blocks, global average pooling and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        channels = STAGES[0][0]
        self.conv1, self.bn1 = nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        for number, (width, blocks, stride) in enumerate(STAGES, start=1):
            self.add_module(f"layer{number}", _bottleneck_stage(channels, width, blocks, stride))
            channels = EXPANSION * width
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, 32, 32) to class scores (n, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for number in range(1, len(STAGES) + 1):
            x = self.get_submodule(f"layer{number}")(x)
        scores: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


def resnet50(classes: int = 10) -> BottleneckResNet:
    """ResNet-50 for 32 pixel colour images, with fresh weights: 16 bottleneck blocks."""
    return BottleneckResNet(classes)


def _bottleneck_stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width, 1) for _ in range(blocks - 1)))
