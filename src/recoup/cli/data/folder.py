"""Images in a folder, decoded batch by batch: one sub-folder per class, or a flat folder without labels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from recoup.cli.data.image_file import MODES, read_image
from recoup.cli.data.spec import DataSpec
from recoup.cli.importing import import_library
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
"""File names that count as images, in lower case."""


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

    def part(self, name: str, rows: Tensor) -> FolderImages:
        """Those of the given rows, under another name."""
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, name=name, paths=tuple(self.paths[row] for row in rows.tolist()), labels=labels)

    def images(self, rows: Tensor) -> Tensor:
        """Decoded, cropped and normalised images of the given rows."""
        # Pillow decodes outside the interpreter lock, so threads help.
        with ThreadPoolExecutor() as pool:
            decoded = list(pool.map(self._decode, rows.tolist()))
        return self.input.normalise(torch.stack(decoded).float() / 255)

    def _decode(self, row: int) -> Tensor:
        return read_image(self.paths[row], self.input.shape)


def open_folder(spec: DataSpec, input: InputSpec) -> FolderImages:
    """The images below a folder; sub-folders are classes, numbered in the order of their sorted names."""
    if not spec.place:
        raise UsageError(f"'{spec.text}' does not say where the images are. Write folder:DIR.")
    require_decodable(spec, input)
    root = Path(spec.place)
    name = f"folder:{root.resolve().name}"
    classes = _class_folders(root)
    if not classes:
        return FolderImages(name, _require_images(image_files(root), root), None, input)
    files = [image_files(folder) for folder in classes]
    labels = torch.tensor([index for index, group in enumerate(files) for _ in group], dtype=torch.int64)
    return FolderImages(name, _require_images([path for group in files for path in group], root), labels, input)


def require_decodable(spec: DataSpec, input: InputSpec) -> None:
    """Refuse an input that image files cannot be brought to, and a machine that cannot read them."""
    if len(input.shape) != 3 or input.shape[0] not in MODES:
        raise DataError(
            f"'{spec.text}': image files cannot be brought to the shape {input.shape} the model expects. "
            "Folders serve models of one or three channels; give batches of your own as path/file.py:factory."
        )
    import_library("PIL.Image", "recoup[data]", DataError)


def _class_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"There is no image folder '{root}'. Check the path after 'folder:'.")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    loose = image_files(root)
    if folders and loose:
        raise DataError(
            f"The image folder '{root}' holds both images ('{loose[0].name}') and sub-folders ('{folders[0].name}'), "
            "so it is unclear whether there are classes. Keep either class folders or loose images in it."
        )
    return folders


def image_files(folder: Path) -> list[Path]:
    """The image files right in a folder, by name."""
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
