"""Small networks and images for `--smoke`: trained in a few seconds on two cores, the same in every process.

Digits of 8 pixels are what networks are for; stripes, made here, are the other data set; blobs the other source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import device_name
from benchmarks.networks import Batches
from benchmarks.paper.training import trained
from benchmarks.paper.workbench import Subject
from recoup.cli.data import open_data
from recoup.cli.input_spec import unnormalised

INPUT = unnormalised((1, 8, 8))
EPOCHS, RATE, BATCH = 14, 0.05, 200
IMAGES = 1000
CLASSES = 10
VGG, RESNET, STRIPED = "small-vgg", "small-resnet", "small-vgg-stripes"
STAND_INS = {"vgg16": VGG, "resnet50": RESNET, "vgg16-digits": STRIPED}
WIDTHS = (12, 16, 24, 24, 32)


def stand_ins(wanted: Sequence[str]) -> list[str]:
    """The small networks that stand for those wanted."""
    return [STAND_INS[name] for name in wanted if name in STAND_INS]


def small_vgg() -> nn.Sequential:
    """Five convolutions with batch norm, two poolings, one linear layer."""
    layers: list[nn.Module] = []
    channels = INPUT.shape[0]
    for place, width in enumerate(WIDTHS):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if place in (1, 3) else []
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, added to the input, as in ResNet-50."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.skip(x) + self.bn3(self.conv3(inner)))


class SmallResNet(nn.Module):
    """A stem and three bottleneck blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(INPUT.shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Bottleneck(16, 16, 32), nn.MaxPool2d(2), Bottleneck(32, 16, 32))
        self.last = Bottleneck(32, 24, 48)
        self.linear = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(F.max_pool2d(self.blocks(F.relu(self.bn1(self.conv1(x)))), 2))
        scores: Tensor = self.linear(x.mean((2, 3)))
        return scores


@cache
def open_subject(network: str) -> Subject:
    """A small network, trained here, with its images."""
    build: dict[str, Callable[[], nn.Module]] = {VGG: small_vgg, RESNET: SmallResNet, STRIPED: small_vgg}
    images = {split: digits(split) for split in ("train", "validation", "test")}
    if network == STRIPED:
        images = {split: stripes(seed) for seed, split in enumerate(images)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = build[network]()
    model = trained(fresh, images["train"], EPOCHS, rate=RATE).model

    def read(data: str, seed: int) -> Batches:
        return calibration(images["train"], data, seed)

    splits = {split: images[split] for split in ("validation", "test")}
    return Subject(network, model, read, f"own:{IMAGES}", splits, lambda: images["train"], device_name("cpu"))


def digits(split: str) -> Batches:
    """The digits of a split."""
    data = open_data(f"digits@{split}", INPUT, batch_size=BATCH)
    return [(batch[0], batch[1]) for batch in data]


def stripes(seed: int) -> Batches:
    """Waves in ten directions under noise: the direction is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    phase = 2 * math.pi * torch.rand(IMAGES, 1, 1, generator=generator)
    angle = (math.pi * labels / CLASSES).view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    waves = torch.sin(1.2 * (rows * angle.sin() + columns * angle.cos()) + phase)
    images = 0.5 + 0.25 * waves + 0.15 * torch.randn(IMAGES, 8, 8, generator=generator)
    return list(zip(images.unsqueeze(1).split(BATCH), labels.split(BATCH), strict=True))


def calibration(own: Batches, data: str, seed: int) -> Batches:
    """So many images of a source: the network's own, blobs, or noise."""
    source, _, number = data.partition(":")
    count, generator = int(number), torch.Generator().manual_seed(seed)
    if source == "own":
        images, labels = (torch.cat(parts) for parts in zip(*own, strict=True))
        chosen = torch.randperm(len(images), generator=generator)[:count]
        return list(zip(images[chosen].split(BATCH), labels[chosen].split(BATCH), strict=True))
    if source == "noise":
        drawn = torch.randn(count, *INPUT.shape, generator=generator)
    else:
        coarse = torch.rand(count, 1, 4, 4, generator=generator)
        drawn = F.interpolate(coarse, scale_factor=2.0, mode="bilinear")
    return list(drawn.split(BATCH))
