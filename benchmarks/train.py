"""Train a network for CIFAR-10 from nothing, and leave alone the images that must stay untouched.

    python -m benchmarks.train resnet20 --data cifar10:DIR --epochs 100 --out DIR/resnet20_cifar10_40k.safetensors

The images are those of the split `calibration`, four fifths of the training images; the other fifth and the test
images are measured on at the end and decide nothing. `--held-out none` trains on all training images.

All images stay on the device, where batches are cut, shifted by up to 1/8 and flipped. SGD with Nesterov momentum, a
cosine schedule after a short rise, smoothed labels; on a GPU channels are last and products are in bfloat16. The seed
decides weights, order and shifts. With `--resume` a run that was stopped goes on after its last whole epoch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import recoup
from recoup.cli.data import open_data
from recoup.cli.models import open_model

# The split that trains, by the one that is held out besides the test images.
TRAINS = {"validation": "calibration", "none": "train"}
# Images per batch while they are read and measured.
READ = 1000
SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train from nothing."""

    epochs: int = 100
    batch: int = 256
    rate: float = 0.2
    smoothing: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Shuffled:
    """Whole batches of images in another order every time, where the images are.

    Torch's generator decides, which `recoup.finetune` seeds for every epoch. Batch norms are not estimated on the few
    images that are left over.
    """

    images: Tensor
    labels: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.images) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images))[: len(self) * self.size]
        for rows in order.to(self.images.device).split(self.size):
            yield self.images[rows], self.labels[rows]


@dataclass(slots=True)
class EpochLines:
    """A line on stderr after every epoch: how many are done, and the seconds of the last."""

    steps: int
    begun: float

    def __call__(self, _: str, done: int, total: int | None) -> None:
        if done % self.steps == 0:
            now = time.perf_counter()
            whole = "" if total is None else f" of {total // self.steps}"
            print(f"epoch {done // self.steps}{whole}: {now - self.begun:.1f} s", file=sys.stderr, flush=True)
            self.begun = now


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        opened = open_model(options.network)

    def read(split: str, limit: int | None = None) -> Any:
        return open_data(f"{options.data}@{split}", opened.input, batch_size=READ, limit=limit, seed=options.seed)

    batches = read(TRAINS[options.held_out], options.images)
    images, labels = (torch.cat(parts).to(options.device) for parts in zip(*batches, strict=True))
    recipe = Recipe(options.epochs, options.batch, options.rate, options.smoothing, options.seed)
    start = time.perf_counter()
    unfinished = options.out.with_name(f"{options.out.name}.unfinished")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    model = trained(opened.model.to(options.device), images, labels, recipe, unfinished if options.resume else None)
    seconds = time.perf_counter() - start
    save(model, options.out)
    unfinished.unlink(missing_ok=True)
    measured = ("validation", "test") if options.held_out == "validation" else ("test",)
    scores = {split: recoup.accuracy(model, read(split)) for split in measured}
    told = ", ".join(f"{split} {score:.2f}" for split, score in scores.items())
    print(f"{options.out}: trained on {len(images):,} images in {seconds:.0f} s, top-1 {told}")


def trained(
    model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe, checkpoint: Path | None = None
) -> nn.Module:
    """A trained copy of the model, in evaluation mode; with a checkpoint, it goes on from there."""
    on_gpu = images.is_cuda
    training = recoup.Training(
        epochs=recipe.epochs,
        rate=recipe.rate,
        smoothing=recipe.smoothing,
        precision="bfloat16" if on_gpu else "float32",
        augment="crop",
        seed=recipe.seed,
    )
    if on_gpu:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it alone
        images = images.contiguous(memory_format=torch.channels_last)
    batches = Shuffled(images, labels, min(recipe.batch, len(images)))
    lines = EpochLines(len(batches), time.perf_counter())
    resume = checkpoint is not None
    return recoup.finetune(model, batches, training, checkpoint=checkpoint, resume=resume, progress=lines).model


def save(model: nn.Module, path: Path) -> None:
    """Write the weights; the file is there as a whole, or not at all."""
    weights = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    fresh = path.with_name(f"{path.name}.new")
    if path.suffix == ".pt":
        torch.save(weights, fresh)
    else:
        save_file(weights, fresh)
    fresh.replace(path)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Recipe()
    parser.add_argument("network", help="such as vgg16_bn, vgg19_bn, resnet20, resnet50")
    parser.add_argument("--data", required=True, metavar="cifar10:DIR", help="DIR holds cifar-10-batches-py")
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors or .pt file")
    parser.add_argument("--held-out", choices=list(TRAINS), default="validation", help="besides the test images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, help="all if not said")
    parser.add_argument("--epochs", type=int, default=usual.epochs)
    parser.add_argument("--batch", type=int, default=usual.batch)
    parser.add_argument("--rate", type=float, default=usual.rate, help="the highest learning rate")
    parser.add_argument("--smoothing", type=float, default=usual.smoothing, help="share of a label spread over all")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--resume", action="store_true", help="keep a checkpoint beside the file, and go on from it")
    options = parser.parse_args(words)
    if options.out.suffix not in SUFFIXES:
        parser.error(f"--out must end in {' or '.join(SUFFIXES)}, got {options.out}")
    if "@" in options.data:
        parser.error(f"--data {options.data} names a split; --held-out decides which images train")
    if ":" not in options.network:
        options.network = f"recoup:{options.network}"
    return options


if __name__ == "__main__":
    main()
