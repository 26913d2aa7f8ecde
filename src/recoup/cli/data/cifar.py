"""CIFAR-10 and CIFAR-100 from their standard Python folders, kept in memory as bytes.

The files are pickles, and a pickle can run code; `pickled` therefore reads them as data and refuses all else. The
splits `calibration` and `validation` are the first four fifths and the last fifth of the training images in a fixed
random order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recoup.cli.data.batches import Pixels
from recoup.cli.data.files import open_regular
from recoup.cli.data.pickled import ByteArray, RefusedError, read_pickle
from recoup.cli.data.spec import DataSpec, unknown_split
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SHAPE = (3, 32, 32)
SPLITS = ("train", "test", "calibration", "validation")
SPLIT_SEED = 0
PIXEL_MAXIMUM = 255
ROW = 3 * 32 * 32
LARGEST_FILE = 256 << 20  # bytes; the largest of the official files has 155 million


@dataclass(frozen=True, slots=True)
class Edition:
    """How one of the two data sets is laid out on disk."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_key: bytes
    classes: int


EDITIONS = {
    "cifar10": Edition(
        "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), b"labels", 10
    ),
    "cifar100": Edition("cifar-100-python", ("train",), ("test",), b"fine_labels", 100),
}
"""The layouts of CIFAR-10 and CIFAR-100."""


def open_cifar(spec: DataSpec, input: InputSpec) -> Pixels:
    """The images and labels of a split of CIFAR-10 or CIFAR-100; the test images when no split is named."""
    split = spec.split or "test"
    if split not in SPLITS:
        raise unknown_split(spec, SPLITS)
    if input.shape != SHAPE:
        raise DataError(
            f"'{spec.text}' has images of shape {SHAPE}, but the model expects {input.shape}. "
            "Use a model made for CIFAR, or give other data."
        )
    edition = EDITIONS[spec.kind]
    folder = _find_folder(spec, edition)
    names = edition.test if split == "test" else edition.train
    parts = [_read_part(folder / name, edition) for name in names]
    pixels, labels = torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
    if split in ("calibration", "validation"):
        rows = _split_rows(split, len(pixels))
        pixels, labels = pixels[rows], labels[rows]
    return Pixels(f"{spec.kind}@{split}", pixels, labels, PIXEL_MAXIMUM, input)


@dataclass(frozen=True, slots=True, eq=False)
class _CifarFile:
    """The content of one file: `pixels` (n, 3, 32, 32) uint8 and `labels` (n,) int64."""

    pixels: Tensor
    labels: Tensor


def _find_folder(spec: DataSpec, edition: Edition) -> Path:
    if not spec.place:
        raise UsageError(f"'{spec.text}' does not say where the data is. Write {spec.kind}:DIR, with @train if wanted.")
    given = Path(spec.place)
    for folder in (given / edition.folder, given):
        if (folder / edition.test[0]).exists() or (folder / edition.train[0]).exists():
            return folder
    raise DataError(
        f"'{spec.text}': there is no {edition.folder} in '{given}'. "
        f"Download and unpack the Python version of {spec.kind}, and give the folder that holds {edition.folder}."
    )


def _split_rows(split: str, count: int) -> Tensor:
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))
    boundary = count * 4 // 5
    return shuffled[:boundary] if split == "calibration" else shuffled[boundary:]


def _read_part(path: Path, edition: Edition) -> _CifarFile:
    content = _unpickle(path)
    if not isinstance(content, Mapping) or b"data" not in content or edition.label_key not in content:
        raise _damaged(path, f"it has no images and '{edition.label_key.decode()}'")
    data, labels = content[b"data"], content[edition.label_key]
    if not isinstance(data, ByteArray) or len(data.shape) != 2 or data.shape[1] != ROW or not data.is_complete:
        raise _damaged(path, f"its images are not rows of {ROW} bytes")
    if not isinstance(labels, list) or len(labels) != data.shape[0]:
        raise _damaged(path, f"it has {data.shape[0]} images but not as many labels")
    if not all(isinstance(label, int) and 0 <= label < edition.classes for label in labels):
        raise _damaged(path, f"its labels are not all from 0 to {edition.classes - 1}")
    return _CifarFile(_pixels(data), torch.tensor(labels, dtype=torch.int64))


def _pixels(data: ByteArray) -> Tensor:
    rows = np.frombuffer(data.content, dtype=np.uint8).reshape(data.shape, order="F" if data.is_column_major else "C")
    return torch.from_numpy(rows.reshape(-1, *SHAPE).copy())


def _unpickle(path: Path) -> object:
    if not path.is_file():
        raise DataError(f"The CIFAR file '{path}' is missing. Download and unpack the whole data set again.")
    with open_regular(path, LARGEST_FILE) as file:
        content = file.read()
    try:
        return read_pickle(content)
    except RefusedError as error:
        raise DataError(
            f"The CIFAR file '{path}' asks for {error}, which is no part of its images and could run code, so it was "
            "not loaded. Do not trust this file; download the data set from its authors."
        ) from error
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:  # a damaged pickle
        raise _damaged(path, f"reading it failed ({type(error).__name__}: {str(error)[:100]})") from error


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"The CIFAR file '{path}' is damaged: {reason}. Download and unpack the data set again.")
