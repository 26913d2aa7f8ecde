"""Networks of the experiments by name: from checkpoints for CIFAR-10, from ImageNet's, or trained in the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.machine import device_name
from benchmarks.networks import Batches, resident
from benchmarks.paper import smoke
from benchmarks.paper.training import trained
from benchmarks.paper.workbench import Subject
from recoup.cli.data import open_data
from recoup.cli.input_spec import InputSpec, unnormalised
from recoup.cli.models import open_model
from recoup.errors import UsageError

# The part of CIFAR-10 that trains and calibrates, as in the paper; the other fifth of the training images validates.
CIFAR_TRAINING = 40_000
OWN, OTHER, NOISE = "own", "other", "noise"


@dataclass(frozen=True, slots=True)
class Known:
    """A network by the name that recoup builds it by, the images it is for, and how its checkpoints begin."""

    model: str
    images: str
    file: str = ""


CIFAR10, IMAGENET, DIGITS = "cifar10", "imagenet", "digits"
NETWORKS = {
    "vgg16": Known("recoup:vgg16_bn", CIFAR10, "vgg16_bn_cifar10"),
    "vgg16-fc": Known("recoup:vgg16_fc_bn", CIFAR10, "vgg16_fc_bn"),
    "vgg19": Known("recoup:vgg19_bn", CIFAR10, "vgg19_bn"),
    "resnet50": Known("recoup:resnet50", CIFAR10, "resnet50"),
    "resnet56": Known("recoup:resnet56", CIFAR10, "resnet56"),
    "resnet20": Known("recoup:resnet20", CIFAR10, "resnet20"),
    "resnet50-imagenet": Known("torchvision:resnet50", IMAGENET),
    "vgg16-imagenet": Known("torchvision:vgg16_bn", IMAGENET),
    "vgg16-digits": Known("recoup:vgg16_bn", DIGITS),
}
SUFFIXES = (".safetensors", ".th", ".pt", ".pth")
DIGIT_EPOCHS = 30


def at_hand(wanted: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The networks among `wanted` that can be opened, or those that the command line names.

    Raises:
        UsageError: one that the command line names cannot.
    """
    if options.smoke:
        return list(options.networks or smoke.stand_ins(wanted))
    missing = [name for name in options.networks or () if not has_weights(name, options)]
    if missing:
        raise UsageError(
            f"there are no weights or images for {', '.join(missing)}. Give --cifar and --checkpoints for networks of "
            "CIFAR-10, --imagenet and --weights NETWORK=FILE for those of ImageNet."
        )
    return list(options.networks or (name for name in wanted if has_weights(name, options)))


def has_weights(network: str, options: argparse.Namespace) -> bool:
    """Whether a network can be opened with what the command line says."""
    known = NETWORKS[network]
    if known.images == DIGITS:
        return True
    place = options.cifar if known.images == CIFAR10 else options.imagenet
    return place is not None and weights_of(network, options) is not None


def weights_of(network: str, options: argparse.Namespace) -> Path | None:
    """The file with a network's weights: the one named, or the first in the folder that begins as it should."""
    if network in options.weights:
        return Path(options.weights[network])
    start = NETWORKS[network].file
    if not start or options.checkpoints is None:
        return None
    files = sorted(path for path in Path(options.checkpoints).glob(f"{start}*") if path.suffix in SUFFIXES)
    return files[0] if files else None


def open_subject(network: str, options: argparse.Namespace) -> Subject:
    """A network by its name here, with its images."""
    if options.smoke:
        return smoke.open_subject(network)
    opener = {CIFAR10: _cifar, IMAGENET: _imagenet, DIGITS: _digits}[NETWORKS[network].images]
    return opener(network, options)


def _cifar(network: str, options: argparse.Namespace) -> Subject:
    opened = open_model(NETWORKS[network].model, weights_of(network, options))

    def read(split: str, limit: int | None = None, seed: int = 0) -> Batches:
        return resident(f"cifar10:{options.cifar}@{split}", opened.input, options, limit, seed)

    return Subject(
        network,
        opened.model.to(options.device),
        _sources(opened.input, lambda count, seed: read("calibration", count, seed), options),
        f"{OWN}:{options.images}",
        {"validation": read("validation", options.validation_images), "test": read("test", options.test_images)},
        lambda: read("calibration"),
        device_name(options.device),
        options.keep_class,
    )


def _imagenet(network: str, options: argparse.Namespace) -> Subject:
    """A folder with `calibration` and `validation`, or the genuine data set, whose `test` are the validation images.

    Of a folder without `test`, every second batch of the validation images is measured on and decides nothing.
    """
    opened = open_model(NETWORKS[network].model, weights_of(network, options))
    root = Path(options.imagenet)

    def read(split: str, limit: int | None = None, seed: int = 0) -> Batches:
        place = f"folder:{root / split}" if (root / split).is_dir() else f"imagenet:{root}@{split}"
        return resident(place, opened.input, options, limit, seed)

    validation = read("validation", options.validation_images)
    has_test = (root / "test").is_dir() or not (root / "validation").is_dir()
    test = read("test", options.test_images) if has_test else validation[1::2]
    return Subject(
        network,
        opened.model.to(options.device),
        _sources(opened.input, lambda count, seed: read("calibration", count, seed), options),
        f"{OWN}:{options.images}",
        {"validation": validation if has_test else validation[::2], "test": test},
        lambda: read("calibration"),
        device_name(options.device),
        options.keep_class,
    )


def _digits(network: str, options: argparse.Namespace) -> Subject:
    """Digits at 32 pixels, and a network trained on them here."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        opened = open_model(NETWORKS[network].model)

    def read(split: str) -> Batches:
        data = open_data(f"digits@{split}", unnormalised((1, 8, 8)), batch_size=500)
        large = [(F.interpolate(images, scale_factor=4.0, mode="bilinear"), labels) for images, labels in data]
        return [(x.repeat(1, 3, 1, 1).to(options.device), y.to(options.device)) for x, y in large]

    training = read("train")
    model = trained(opened.model.to(options.device), training, DIGIT_EPOCHS, rate=0.05).model
    splits = {split: read(split) for split in ("validation", "test")}
    own = f"{OWN}:{sum(len(labels) for _, labels in training)}"
    machine = device_name(options.device)

    def draw(data: str, seed: int) -> Batches:
        return drawn_from(training, data, seed)

    return Subject(network, model, draw, own, splits, lambda: training, machine)


def drawn_from(batches: Batches, data: str, seed: int) -> Batches:
    """So many of these images, drawn by the seed.

    Raises:
        UsageError: `data` asks for another source, or for more images than there are.
    """
    source, _, count = data.partition(":")
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if source != OWN or int(count) > len(images):
        raise UsageError(f"{data} is asked for; there are {len(images):,} images of the network's own and no others")
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: int(count)].to(images.device)
    return list(zip(images[rows].split(len(batches[0][1])), labels[rows].split(len(batches[0][1])), strict=True))


def _sources(
    spec: InputSpec, own: Callable[[int, int], Batches], options: argparse.Namespace
) -> Callable[[str, int], Batches]:
    """Calibration images by "source:count" and seed: the network's own, those of another source, or noise."""

    def read(data: str, seed: int) -> Batches:
        source, _, count = data.partition(":")
        if source == OWN:
            return own(int(count), seed)
        place = f"noise:{count}" if source == NOISE else other_source(options)
        batches = open_data(place, spec, batch_size=options.batch or 1000, limit=int(count), seed=seed)
        if batches.count != int(count):
            raise UsageError(f"{place} has {batches.count:,} images, and {int(count):,} are asked for")
        labelled = ((batch, None) if isinstance(batch, torch.Tensor) else batch for batch in batches)
        return [images.to(options.device) for images, _ in labelled]  # type: ignore[misc]  # calibration needs no labels

    return read


def other_source(options: argparse.Namespace) -> str:
    """The other source as data by name: a folder of images, or what is named with its kind."""
    place = str(options.other_source)
    return place if ":" in place else f"folder:{place}"
