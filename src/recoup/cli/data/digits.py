"""The 1,797 handwritten digits that come with scikit-learn: 8x8 grey images, nothing to download."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.cli.data.batches import Pixels
from recoup.cli.data.spec import DataSpec, unknown_split
from recoup.cli.importing import import_library
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SHAPE = (1, 8, 8)
SPLITS = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}
"""Where each split begins and ends, as fractions of all images in a fixed random order."""
SPLIT_SEED = 0
PIXEL_MAXIMUM = 16


def open_digits(spec: DataSpec, input: InputSpec) -> Pixels:
    """The digits of a split in a fixed random order, or all of them in scikit-learn's order when none is named."""
    if spec.place:
        raise UsageError(
            f"'{spec.text}': the digits come with scikit-learn and need no folder. Write digits or digits@train."
        )
    if spec.split and spec.split not in SPLITS:
        raise unknown_split(spec, SPLITS)
    if input.shape != SHAPE:
        raise DataError(
            f"'{spec.text}' has images of shape {SHAPE}, but the model expects {input.shape}. "
            "Use a model made for them, such as recoup:digits, or give other data."
        )
    datasets = import_library("sklearn.datasets", "recoup[data]", DataError)
    bundle = datasets.load_digits()
    rows = _split_rows(spec.split, len(bundle.target))
    pixels = torch.from_numpy(bundle.images).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bundle.target).to(torch.int64)
    return Pixels(spec.text, pixels[rows], labels[rows], PIXEL_MAXIMUM, input)


def _split_rows(split: str, count: int) -> Tensor:
    if not split:
        return torch.arange(count)
    begin, end = SPLITS[split]
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return shuffled[int(begin * count) : int(end * count)]
