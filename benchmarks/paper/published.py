"""Figures that the paper reports, and those of its rivals as it quotes them.

Source of all: Xie, Fu, Tian, Zhou, Chen, "Pruning with Compensation" (arXiv 2108.13728). A rival's own paper is named
with it. Shares are percent of the FLOPs removed, drops are points of top-1 accuracy. None of these was measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SOURCE = "arXiv 2108.13728"


@dataclass(frozen=True, slots=True)
class Published:
    """What the paper reports for a tolerance: FLOPs removed, in percent, and points lost on the test images."""

    tolerance: float
    removed: float
    test_drop: float


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival that retrains: FLOPs removed, points lost (below zero: gained), and its own paper."""

    name: str
    removed: float
    test_drop: float
    source: str


@dataclass(frozen=True, slots=True)
class Hours:
    """GPU hours by stage on the authors' GPU; `retraining` is that of 100 epochs, where it is given."""

    statistics: float
    selection: float
    search: float
    total: float
    retraining: float | None = None


# VGG-16 on CIFAR-10, Table II. The tolerance is what may be lost on validation images, not what was lost.
PUBLISHED = (
    Published(0.5, 43.23, 0.45),
    Published(1.0, 50.90, 0.80),
    Published(1.5, 56.77, 1.30),
    Published(2.0, 59.72, 1.72),
    Published(2.5, 65.61, 2.09),
)
TOLERANCES = tuple(published.tolerance for published in PUBLISHED)
# ResNet-50 on ImageNet, Table I; the last column of the test is ImageNet's validation set.
RESNET50 = (
    Published(0.5, 41.39, 0.44),
    Published(1.0, 46.84, 0.89),
    Published(2.0, 52.10, 1.84),
    Published(5.0, 62.58, 4.87),
)
BASE: Mapping[str, float] = MappingProxyType({"vgg16": 93.96, "resnet50": 76.00})

_HRANK, _GAL, _DCP = "HRank (arXiv 2002.10179)", "GAL (arXiv 1903.09291)", "DCP (arXiv 1810.11809)"
VGG16_RIVALS = (
    Rival("GAL", 39.6, 0.19, _GAL),
    Rival("GAL", 45.2, 0.54, _GAL),
    Rival("DCP", 50.1, 0.31, _DCP),
    Rival("CAC", 51.0, -0.43, "CAC, as the paper quotes it"),
    Rival("HRank", 53.5, 0.53, _HRANK),
    Rival("HRank", 76.5, 2.73, _HRANK),
)
_META, _THINET = "MetaPruning (arXiv 1903.10258)", "ThiNet (arXiv 1707.06342)"
RESNET50_RIVALS = (
    Rival("MetaPruning", 26.8, 0.40, _META),
    Rival("ThiNet", 42.0, 1.27, _THINET),
    Rival("FPGM", 42.2, 0.56, "FPGM (arXiv 1811.00250)"),
    Rival("GAL", 43.0, 4.20, _GAL),
    Rival("HRank", 43.8, 1.17, _HRANK),
    Rival("IE", 45.0, 1.68, "Importance estimation (arXiv 1906.10771)"),
    Rival("MetaPruning", 51.2, 1.20, _META),
    Rival("DCP", 51.6, 1.02, _DCP),
    Rival("GAL", 55.0, 4.35, _GAL),
    Rival("ThiNet", 55.8, 3.27, _THINET),
    Rival("GAL", 61.4, 6.27, _GAL),
    Rival("HRank", 62.1, 4.17, _HRANK),
    Rival("ThiNet", 71.5, 7.13, _THINET),
    Rival("GAL", 72.9, 6.84, _GAL),
    Rival("HRank", 76.0, 7.05, _HRANK),
)

# FLOPs removed from VGG-19 on ImageNet at tolerance 2, Table III, by the images that the statistics were taken on.
LIMITED_DATA: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "own": {"50": 49.50, "20": 48.48, "10": 48.87, "5": 48.69},
        "other": {"100": 47.93, "50": 47.94, "10": 47.59},
        "noise": {"50": 24.44, "20": 24.00, "10": 24.44, "5": 20.78},
    }
)

# FLOPs removed from VGG-19 on CIFAR-100, Table V, by visiting order and tolerance.
ORDER_TOLERANCES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
ORDERS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "bottom-up": (19.21, 19.63, 26.04, 33.89, 35.95, 37.36, 40.94, 44.77),
        "top-down": (18.10, 23.05, 28.96, 32.88, 36.20, 39.64, 42.65, 42.47),
        "random": (16.48, 25.62, 28.45, 33.82, 32.96, 38.10, 39.01, 44.72),
    }
)

# Table IV. One tolerance each; VGG-16 with 40,000 images of CIFAR-10, ResNet-50 with ImageNet.
HOURS: Mapping[str, Hours] = MappingProxyType(
    {
        "vgg16": Hours(0.071, 0.076, 0.053, 0.20, retraining=2.28),
        "resnet50": Hours(1.616, 0.208, 0.672, 2.51),
    }
)
PUBLISHED_SECONDS = round(3600 * HOURS["vgg16"].total)
PUBLISHED_WITH = "its authors' GPU, 40,000 images"
# 16 blocks of ResNet-50, three steps each.
RESNET50_EVALUATIONS = 48
