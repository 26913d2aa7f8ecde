"""Images in a folder, decoded batch by batch: one sub-folder per class, or a flat folder without labels.

Every image is scaled so that it covers a frame slightly larger than the model's input (by 256 / 224, as is usual for
ImageNet; exactly its size for inputs of up to 64 pixels), and the centre is cut out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recoup.cli.data.spec import DataSpec
from recoup.cli.importing import import_library
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
"""File names that count as images, in lower case."""

MODES = {1: "L", 3: "RGB"}
"""How Pillow calls images of one and of three channels."""

SMALL_INPUT = 64
"""Inputs up to this many pixels are filled exactly, without a border to crop."""


@dataclass(frozen=True, slots=True, eq=False)
class FolderImages:
    """Image files, the class of each (None for a flat folder) and the input they are brought to."""

    name: str
    paths: tuple[Path, ...]
    labels: Tensor | None
    input: InputSpec

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self.paths)

    def images(self, rows: Tensor) -> Tensor:
        """Decoded, cropped and normalised images of the given rows."""
        # Pillow decodes outside the interpreter lock, so threads help.
        with ThreadPoolExecutor() as pool:
            decoded = list(pool.map(self._decode, rows.tolist()))
        return self.input.normalise(torch.stack(decoded).float() / 255)

    def _decode(self, row: int) -> Tensor:
        return _read_image(self.paths[row], self.input.shape)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The size an image is scaled to, (width, height), and the box (left, top, right, bottom) cut out of it."""

    size: tuple[int, int]
    box: tuple[int, int, int, int]


def open_folder(spec: DataSpec, input: InputSpec) -> FolderImages:
    """The images below a folder; sub-folders are classes, numbered in the order of their sorted names."""
    if not spec.place:
        raise UsageError(f"'{spec.text}' does not say where the images are. Write folder:DIR.")
    if len(input.shape) != 3 or input.shape[0] not in MODES:
        raise DataError(
            f"'{spec.text}': image files cannot be brought to the shape {input.shape} the model expects. "
            "Folders serve models of one or three channels; give batches of your own as path/file.py:factory."
        )
    import_library("PIL.Image", "recoup[data]", DataError)
    root = Path(spec.place)
    name = f"folder:{root.resolve().name}"
    classes = _class_folders(root)
    if not classes:
        return FolderImages(name, _require_images(_image_files(root), root), None, input)
    files = [_image_files(folder) for folder in classes]
    labels = torch.tensor([index for index, group in enumerate(files) for _ in group], dtype=torch.int64)
    return FolderImages(name, _require_images([path for group in files for path in group], root), labels, input)


def _class_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"There is no image folder '{root}'. Check the path after 'folder:'.")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    loose = _image_files(root)
    if folders and loose:
        raise DataError(
            f"The image folder '{root}' holds both images ('{loose[0].name}') and sub-folders ('{folders[0].name}'), "
            "so it is unclear whether there are classes. Keep either class folders or loose images in it."
        )
    return folders


def _image_files(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES and not entry.name.startswith(".")
    )


def _require_images(paths: list[Path], root: Path) -> tuple[Path, ...]:
    if not paths:
        raise DataError(
            f"There are no images in '{root}': nothing there or in its class folders ends in "
            f"{', '.join(sorted(SUFFIXES))}. Check the path after 'folder:'."
        )
    return tuple(paths)


def _read_image(path: Path, shape: tuple[int, ...]) -> Tensor:
    """One image as bytes (channels, height, width)."""
    pillow = import_library("PIL.Image", "recoup[data]", DataError)
    channels, height, width = shape
    try:
        with pillow.open(path) as file:
            pixels = _crop(file.convert(MODES[channels]), height, width)
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, ValueError and more for damaged files
        raise DataError(
            f"The image '{path}' could not be read ({type(error).__name__}). Replace it or take it out of the folder."
        ) from error
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)


def _crop(image: Any, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    frame = _frame(image.width, image.height, height, width)
    if frame.size != image.size:
        pillow = import_library("PIL.Image", "recoup[data]", DataError)
        image = image.resize(frame.size, pillow.Resampling.BILINEAR)
    return np.array(image.crop(frame.box))


def _frame(image_width: int, image_height: int, height: int, width: int) -> _Frame:
    scale = max(_covering(height) / image_height, _covering(width) / image_width)
    scaled_width, scaled_height = round(image_width * scale), round(image_height * scale)
    left, top = (scaled_width - width) // 2, (scaled_height - height) // 2
    return _Frame((scaled_width, scaled_height), (left, top, left + width, top + height))


def _covering(size: int) -> int:
    return round(size * 256 / 224) if size > SMALL_INPUT else size
