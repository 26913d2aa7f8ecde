"""One image file: looked at before it is decoded, then brought to the size of the model's input.

An image is scaled so that it covers a frame slightly larger than the input (by 256 / 224, as is usual for ImageNet;
exactly its size for inputs of up to 64 pixels), and the centre is cut out.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recoup.cli.data.files import open_regular
from recoup.cli.importing import import_library
from recoup.errors import DataError

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
"""What may be in an image file, whatever its name: Pillow knows forty more, some of which start other programs."""

MODES = {1: "L", 3: "RGB"}
"""How Pillow calls images of one and of three channels."""

SMALL_INPUT = 64
"""Inputs up to this many pixels are filled exactly, without a border to crop."""

LARGEST_FILE = 512 << 20
# A few bytes can stand for a huge image. So many pixels take up to 800 MB while they are decoded (WebP; a PNG 400 MB).
MOST_PIXELS = 50 << 20
# Larger images than this are decoded one at a time, whatever the number of threads.
MANY_PIXELS = 4 << 20
_alone = threading.Lock()


@dataclass(frozen=True, slots=True)
class Frame:
    """The size an image is scaled to, (width, height), and the box (left, top, right, bottom) cut out of it."""

    size: tuple[int, int]
    box: tuple[int, int, int, int]


def read_image(path: Path, shape: tuple[int, ...]) -> Tensor:
    """One image as bytes (channels, height, width).

    Raises:
        DataError: it is no regular file, no image of a known format, damaged, or too large or too long to be decoded.
    """
    pillow = import_library("PIL.Image", "recoup[data]", DataError)
    channels, height, width = shape
    try:
        with open_regular(path, LARGEST_FILE) as file, pillow.open(file, formats=FORMATS) as image:
            frame = _frame(image.width, image.height, height, width)
            _check_size(path, image, frame)
            with _alone if image.width * image.height > MANY_PIXELS else nullcontext():
                pixels = _crop(_converted(image, MODES[channels]), frame)
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, ValueError and more for damaged files
        raise DataError(
            f"The image '{path}' could not be read ({type(error).__name__}). Replace it or take it out of the folder."
        ) from error
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)


def _frame(image_width: int, image_height: int, height: int, width: int) -> Frame:
    scale = max(_covering(height) / image_height, _covering(width) / image_width)
    scaled_width, scaled_height = round(image_width * scale), round(image_height * scale)
    left, top = (scaled_width - width) // 2, (scaled_height - height) // 2
    return Frame((scaled_width, scaled_height), (left, top, left + width, top + height))


def _covering(size: int) -> int:
    return round(size * 256 / 224) if size > SMALL_INPUT else size


def _check_size(path: Path, image: Any, frame: Frame) -> None:
    """An image may be large as it is, or become large when its short side is made to cover the input."""
    for what, (width, height) in (("has", image.size), ("would be scaled to", frame.size)):
        if width * height > MOST_PIXELS:
            raise DataError(
                f"The image '{path}' {what} {width:,} x {height:,} pixels, more than the {MOST_PIXELS:,} that are "
                "decoded. Scale it down, or take it out of the folder."
            )


def _converted(image: Any, mode: str) -> Any:
    """Pillow cuts off what is brighter than 255 where it takes sixteen bits for eight."""
    if image.mode.startswith("I"):
        pillow = import_library("PIL.Image", "recoup[data]", DataError)
        image = pillow.fromarray((np.asarray(image).astype(np.int32) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert(mode)


def _crop(image: Any, frame: Frame) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if frame.size != image.size:
        pillow = import_library("PIL.Image", "recoup[data]", DataError)
        image = image.resize(frame.size, pillow.Resampling.BILINEAR)
    return np.array(image.crop(frame.box))
