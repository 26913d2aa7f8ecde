"""VGG-16 and VGG-19 with batch norm in CIFAR form: one flat `nn.Sequential` that ends in one linear layer or three.

Every width stands for conv3x3 without bias, batch norm and ReLU; `POOL` halves the image. State-dict keys are the
indices of the `Sequential`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

POOL = 0
"""The place in a list of widths where the image is halved."""

VGG16_WIDTHS = (64, 64, POOL, 128, 128, POOL, *[256] * 3, POOL, *[512] * 3, POOL, *[512] * 3)
"""The thirteen convolution widths of VGG-16."""

VGG19_WIDTHS = (64, 64, POOL, 128, 128, POOL, *[256] * 4, POOL, *[512] * 4, POOL, *[512] * 4)
"""The sixteen convolution widths of VGG-19."""


def vgg16_bn(classes: int = 10) -> nn.Sequential:
    """VGG-16 with batch norm for 32 pixel colour images, with fresh weights."""
    return _vgg(VGG16_WIDTHS, classes)


def vgg19_bn(classes: int = 10) -> nn.Sequential:
    """VGG-19 with batch norm for 32 pixel colour images, with fresh weights."""
    return _vgg(VGG19_WIDTHS, classes)


def vgg16_fc_bn(classes: int = 10) -> nn.Sequential:
    """VGG-16 with three fully connected layers, all but the last with batch norm, with fresh weights."""
    return _vgg(VGG16_WIDTHS, classes, hidden=2)


def _vgg(widths: tuple[int, ...], classes: int, hidden: int = 0) -> nn.Sequential:
    width = widths[-1]
    inner = [part for _ in range(hidden) for part in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), *inner, nn.Linear(width, classes))
    return nn.Sequential(*_features(widths), *head)


def _features(widths: tuple[int, ...]) -> Iterator[nn.Module]:
    channels = 3
    for width in widths:
        if width == POOL:
            yield nn.MaxPool2d(2)
            continue
        yield nn.Conv2d(channels, width, 3, padding=1, bias=False)
        yield nn.BatchNorm2d(width)
        yield nn.ReLU(inplace=True)
        channels = width
