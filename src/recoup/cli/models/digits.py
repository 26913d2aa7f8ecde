"""A small residual network for 8x8 handwritten digits, and the short training that makes it worth pruning.

It is far wider than the task asks for, so that a good part of it can go; it trains in seconds on a processor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.errors import UsageError

TRAINING_BATCH = 64
PEAK_LEARNING_RATE = 4e-3
WEIGHT_DECAY = 1e-2
# A digit fills most of its 8x8 image: shifts of more than one pixel cut strokes off.
LARGEST_SHIFT = 1

Progress = Callable[[int, float], None]
"""Told after every epoch: how many are done, and the mean training loss of the last."""

DEMO_WIDTH = 48


class DigitsBlock(nn.Module):
    """Two 3x3 convolutions added to their input, through a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if channels == width and stride == 1 else _projection(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, h, w) to (n, width, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitsResNet(nn.Module):
    """A stem, three residual stages of `width`, `2 * width` and `4 * width` channels, pooling, a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stage1 = DigitsBlock(width, width, 1)
        self.stage2 = DigitsBlock(width, 2 * width, 2)
        self.stage3 = DigitsBlock(2 * width, 4 * width, 2)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 1, 8, 8) to class scores (n, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        scores: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


def digits_resnet(width: int = 32, classes: int = 10) -> DigitsResNet:
    """A residual network for 1x8x8 digits, with fresh weights.

    >>> digits_resnet(width=8)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    if width < 1:
        raise UsageError(f"digits_resnet: width {width} leaves no channels. Give a width of at least 1.")
    return DigitsResNet(width, classes)


def demo_network(classes: int = 10) -> DigitsResNet:
    """The network that the demo trains and prunes, with fresh weights."""
    return digits_resnet(width=DEMO_WIDTH, classes=classes)


def train_digits(
    model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, seed: int, progress: Progress | None = None
) -> nn.Module:
    """A trained copy of `model` in evaluation mode, initialised afresh: it depends on the architecture, data and seed.

    AdamW under a one-cycle schedule, with every image shifted by up to a pixel.

    Args:
        model: the architecture; neither its weights nor its mode change.
        images: (n, 1, 8, 8), normalised.
        labels: (n,) class indices.
        epochs: passes over the images.
        seed: decides initial weights, order and shifts.
        progress: told after every epoch.
    """
    if epochs < 1 or len(images) != len(labels) or len(images) < 2:
        raise UsageError(
            f"train_digits: {epochs} epochs over {len(images)} images with {len(labels)} labels cannot be trained on. "
            "Give at least one epoch, two images and one label per image."
        )
    # The generators of other devices are left alone: training happens where the images are, from CPU draws.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        learner = _fresh_copy(model)
        _fit(learner, images, labels, epochs, progress)
    return learner.eval()


def _projection(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))


def _fresh_copy(model: nn.Module) -> nn.Module:
    learner = copy.deepcopy(model).train()
    for module in learner.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return learner


def _fit(learner: nn.Module, images: Tensor, labels: Tensor, epochs: int, progress: Progress | None) -> None:
    batches = max(1, len(images) // TRAINING_BATCH)
    optimiser = torch.optim.AdamW(learner.parameters(), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_LEARNING_RATE, total_steps=epochs * batches)
    for epoch in range(1, epochs + 1):
        total = 0.0
        # Near-equal parts: batch norm never meets a batch of one image.
        for rows in torch.randperm(len(images)).tensor_split(batches):
            loss = F.cross_entropy(learner(_shifted(images[rows])), labels[rows])
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
            total += loss.item()
        if progress is not None:
            progress(epoch, total / batches)


def _shifted(images: Tensor) -> Tensor:
    """Every image moved by its own whole number of pixels, the border filled with its edge value."""
    n, _, height, width = images.shape
    down, right = torch.randint(0, 2 * LARGEST_SHIFT + 1, (2, n))
    padded = F.pad(images, (LARGEST_SHIFT,) * 4, mode="replicate")
    y = (down[:, None] + torch.arange(height))[:, None, :, None]
    x = (right[:, None] + torch.arange(width))[:, None, None, :]
    every = torch.arange(n)[:, None, None, None]
    channel = torch.arange(images.shape[1])[None, :, None, None]
    return padded[every, channel, y, x]
