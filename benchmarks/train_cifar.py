"""Train a network on 40,000 images of CIFAR-10: one whose validation and test images nobody has looked at.

    python -m benchmarks.train_cifar --cifar DIR --device cuda --out DIR/resnet20_cifar10_40k.safetensors

The images are those of the split `calibration`, four fifths of the training images. SGD with momentum and a cosine
schedule; images are shifted by up to four pixels and flipped. The other fifth and the test images are measured on at
the end and decide nothing. On a GPU the products are in bfloat16. The seed decides weights, order and shifts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import recoup
from recoup.cli.data import open_data
from recoup.cli.models import open_model

# Pixels by which an image is shifted at most, as is usual for CIFAR.
SHIFT = 4
# The part of the steps over which the learning rate rises.
WARM_UP = 0.05


@dataclass(frozen=True, slots=True)
class Training:
    """How to train."""

    epochs: int = 100
    batch: int = 256
    rate: float = 0.2
    momentum: float = 0.9
    decay: float = 5e-4
    seed: int = 0


def main() -> None:
    options = parse()
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        opened = open_model(options.model)
    data = f"cifar10:{options.cifar}"
    batches = list(open_data(f"{data}@calibration", opened.input, batch_size=1000, limit=options.images))
    images, labels = (torch.cat(parts).to(options.device) for parts in zip(*batches, strict=True))
    start = time.perf_counter()
    settings = Training(options.epochs, options.batch, options.rate, seed=options.seed)
    model = trained(opened.model.to(options.device), images, labels, settings)
    seconds = time.perf_counter() - start
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}, options.out)
    scores = {
        split: recoup.accuracy(model, open_data(f"{data}@{split}", opened.input, batch_size=1000))
        for split in ("validation", "test")
    }
    print(f"{options.out}: trained on {len(images):,} images in {seconds:.0f} s, top-1 {scores}")


def trained(model: nn.Module, images: Tensor, labels: Tensor, settings: Training) -> nn.Module:
    """A trained copy of the model, in evaluation mode: `recoup.finetune` on batches that are drawn anew every epoch."""
    training = recoup.Training(
        epochs=settings.epochs,
        rate=settings.rate,
        momentum=settings.momentum,
        decay=settings.decay,
        warm_up=WARM_UP,
        precision="bfloat16" if images.is_cuda else "float32",
        seed=settings.seed,
    )
    batches = Shuffled(images, labels, min(settings.batch, len(images)))

    def tell(_: str, done: int, total: int | None) -> None:
        if done % len(batches) == 0:
            print(f"{done:,} of {total:,} steps", file=sys.stderr, flush=True)

    return recoup.finetune(model, batches, training, progress=tell).model


@dataclass(frozen=True, slots=True, eq=False)
class Shuffled:
    """Whole batches of images in another order every time, shifted and flipped, where the images are.

    Torch's generator decides, which `recoup.finetune` seeds for every epoch. Batch norms are not estimated on the few
    images that are left over.
    """

    images: Tensor
    labels: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.images) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        order = torch.randperm(len(self.images), generator=generator)[: len(self) * self.size]
        for rows in order.to(self.images.device).split(self.size):
            yield shifted(self.images[rows], generator), self.labels[rows]


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: up in a line, down along a cosine."""
    return recoup.Training(rate=peak, warm_up=WARM_UP).rate_at(step, steps)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image (n, c, h, w) moved by up to `SHIFT` pixels, zeros coming in, and every second one flipped."""
    count, channels, height, width = images.shape
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=generator).to(images.device)
    flip = torch.rand(count, 1, generator=generator).to(images.device) < 0.5
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    rows, columns = rows + down, torch.where(flip, columns.flip(0), columns) + right
    sample = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return F.pad(images, (SHIFT,) * 4)[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Training()
    parser.add_argument("--cifar", default=os.environ.get("RECOUP_CIFAR10"), help="folder with cifar-10-batches-py")
    parser.add_argument("--model", default="recoup:resnet20")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, help="all 40,000 if not said")
    parser.add_argument("--epochs", type=int, default=usual.epochs)
    parser.add_argument("--batch", type=int, default=usual.batch)
    parser.add_argument("--rate", type=float, default=usual.rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file")
    options = parser.parse_args(words)
    if options.cifar is None:
        parser.error("--cifar must be said")
    return options


if __name__ == "__main__":
    main()
