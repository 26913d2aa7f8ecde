"""What most examples prune: a small network, trained in seconds on the handwritten digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Digits:
    """Batches of (images, labels). The test images decide nothing; they are looked at once, at the end."""

    train: Batches
    validation: Batches
    test: Batches


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution, its norm and its activation."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class DigitNetwork(nn.Module):
    """Four convolutions, one residual addition and a linear layer, for grey images of 8 by 8 pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = block(1, width, stride=2)
        self.residual = nn.Sequential(block(width, width), block(width, width))
        self.down = block(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten digits (samples, 10) for images (samples, 1, 8, 8)."""
        x = self.stem(x)
        x = self.down(x + self.residual(x))
        return self.head(x.mean((2, 3)))


def load(batch_size: int = 100) -> Digits:
    """The 1,797 digits in a fixed random order: 1,000 to train and calibrate, 400 to validate, 397 to test."""
    bundle = load_digits()
    order = torch.randperm(len(bundle.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(bundle.images).float().unsqueeze(1)[order] / 16
    labels = torch.from_numpy(bundle.target).long()[order]
    batches = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
    at = [1000 // batch_size, 1400 // batch_size]
    return Digits(batches[: at[0]], batches[at[0] : at[1]], batches[at[1] :])


def train(network: nn.Module, batches: Batches, epochs: int, rate: float = 0.01) -> None:
    """Adam and the cross-entropy of the labels. The network is changed and left in eval mode."""
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    network.train()
    for _ in range(epochs):
        for images, labels in batches:
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimiser.step()
    network.eval()


def trained_network(batches: Batches, epochs: int = 4, width: int = 16) -> DigitNetwork:
    """A `DigitNetwork` that reads about 95 of 100 digits."""
    torch.manual_seed(0)
    network = DigitNetwork(width)
    train(network, batches, epochs)
    return network
