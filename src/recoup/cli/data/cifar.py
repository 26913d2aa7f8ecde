"""CIFAR-10 and CIFAR-100 from their standard Python folders, kept in memory as bytes.

The files are pickles, and a pickle can run code; `_ArrayUnpickler` therefore builds numpy arrays and plain containers
and refuses all else. The splits `calibration` and `validation` are the first four fifths and the last fifth of the
training images in a fixed random order.
"""

from __future__ import annotations

import _codecs
import functools
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recoup.cli.data.batches import Pixels
from recoup.cli.data.spec import DataSpec, unknown_split
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SHAPE = (3, 32, 32)
SPLITS = ("train", "test", "calibration", "validation")
SPLIT_SEED = 0
PIXEL_MAXIMUM = 255


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
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise _damaged(path, "its images are not rows of 3072 bytes")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise _damaged(path, f"it has {len(data)} images but not as many labels")
    if not all(isinstance(label, int) and 0 <= label < edition.classes for label in labels):
        raise _damaged(path, f"its labels are not all from 0 to {edition.classes - 1}")
    return _CifarFile(torch.from_numpy(data.reshape(-1, *SHAPE).copy()), torch.tensor(labels, dtype=torch.int64))


def _unpickle(path: Path) -> object:
    if not path.is_file():
        raise DataError(f"The CIFAR file '{path}' is missing. Download and unpack the whole data set again.")
    try:
        with path.open("rb") as file:
            # The original files were written by Python 2, whose strings are bytes.
            return _ArrayUnpickler(file, encoding="bytes").load()
    except _RefusedError as error:
        raise DataError(
            f"The CIFAR file '{path}' asks for {error}, which is no part of an array and could run code, so it was not "
            "loaded. Do not trust this file; download the data set from its authors."
        ) from error
    except Exception as error:  # a damaged pickle can raise almost any kind of error
        raise _damaged(path, f"reading it raised {type(error).__name__}") from error


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"The CIFAR file '{path}' is damaged: {reason}. Download and unpack the data set again.")


class _RefusedError(Exception):
    """A pickle named something other than the parts of an array."""


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and plain containers, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ARRAY_PARTS[module, name]
        except KeyError:
            raise _RefusedError(f"{module}.{name}") from None


def _array_parts() -> dict[tuple[str, str], object]:
    """What pickled arrays name, under the module paths of numpy 1 and 2."""
    array = np.zeros(1)
    reconstruct: Any = array.__reduce__()[0]
    from_buffer: Any = array.__reduce_ex__(5)[0]
    parts: dict[tuple[str, str], object] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _codecs.encode,
    }
    for core in ("numpy.core", "numpy._core"):
        parts[f"{core}.multiarray", "_reconstruct"] = reconstruct
        # A partial of our own: a pickle may set attributes on what it is handed, and this one is nobody else's.
        parts[f"{core}.numeric", "_frombuffer"] = functools.partial(from_buffer)
    return parts


_ARRAY_PARTS = _array_parts()
