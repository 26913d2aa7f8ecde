"""Prune a network of your own within a tolerance, with pictures from a folder.

    python examples/own_model_and_folder.py
    python examples/own_model_and_folder.py --pictures FOLDER --weights trained.pt --output smaller

FOLDER has one sub-folder per class. Without it, digits are written as PNG files into a temporary folder. Without
weights, the network is trained for a few epochs first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import digits
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

import recoup


class PictureNetwork(nn.Module):
    """Stands for your own class. Recoup needs to know nothing about it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(digits.block(3, 16, stride=2), digits.block(16, 32), digits.block(32, 32))
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (samples, classes) of pictures (samples, 3, height, width)."""
        return self.head(self.features(x).mean((2, 3)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, train if need be, prune, save and load."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        pictures = options.pictures or write_digits(Path(scratch, "pictures"))
        batches, classes = read(pictures, options.size)
        fifth = max(1, len(batches) // 5)
        validation, calibration = batches[:fifth], batches[fifth:]

        torch.manual_seed(0)
        network = PictureNetwork(classes)
        if options.weights:
            network.load_state_dict(torch.load(options.weights, weights_only=True))
        else:
            digits.train(network, calibration, options.epochs)

        result = recoup.prune(
            network, calibration, validation=validation, tolerance=options.tolerance, method=options.method
        )
        print(result.report)

        folder = result.save(options.output or Path(scratch, "smaller"))
        smaller = recoup.load(folder, lambda: PictureNetwork(classes)).eval()
        print(f"loaded again: {recoup.accuracy(smaller, validation):.1f} % of the validation pictures are right")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Prune a network of your own, with pictures from a folder.")
    parser.add_argument("--pictures", type=Path, help="a folder with one sub-folder of pictures per class")
    parser.add_argument("--weights", type=Path, help="a state dict of PictureNetwork")
    parser.add_argument("--size", type=int, default=8, help="pixels that every picture is scaled to")
    parser.add_argument("--epochs", type=int, default=4, help="of training, where there are no weights")
    parser.add_argument("--tolerance", type=float, default=3.0, help="points of accuracy that may be lost")
    parser.add_argument("--output", type=Path, help="a new folder for the result")
    parser.add_argument("--method", default="best", help="best, fast, paper or released")
    return parser.parse_args(arguments)


def read(folder: Path, size: int, batch_size: int = 100) -> tuple[digits.Batches, int]:
    """Batches of (pictures, labels) in a random order, and how many classes there are."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(path, label) for label, place in enumerate(classes) for path in sorted(place.iterdir())]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    pictures = torch.stack([read_picture(files[place][0], size) for place in order])
    labels = torch.tensor([files[place][1] for place in order])
    return list(zip(pictures.split(batch_size), labels.split(batch_size), strict=True)), len(classes)


def read_picture(path: Path, size: int) -> Tensor:
    """Colours in [0, 1], (3, size, size)."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB").resize((size, size)), dtype=np.float32)
    return torch.from_numpy(pixels).movedim(2, 0) / 255


def write_digits(folder: Path) -> Path:
    """A thousand digits of scikit-learn as PNG files, one sub-folder per digit."""
    bundle = load_digits()
    for number, (image, label) in enumerate(zip(bundle.images[:1000], bundle.target[:1000], strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(place / f"{number}.png")
    return folder


if __name__ == "__main__":
    main()
