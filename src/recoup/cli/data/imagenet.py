"""ImageNet (ILSVRC 2012) in the folders it comes in, with the paper's split of its training images.

    DIR/train/n01440764/*.JPEG         1,281,167 training images, a folder per class
    DIR/val/n01440764/*.JPEG           50,000 validation images, sorted into classes as is usual, or
    DIR/val/*.JPEG                     as they were published, with LOC_val_solution.csv in DIR or in val

Classes are numbered in the order of their folders' names. `calibration` and `validation` are 95 % and 5 % of the
training images in a fixed random order; `test` is the validation set as published, which nothing may be chosen by.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from recoup.cli.data.files import open_regular
from recoup.cli.data.folder import FolderImages, image_files, open_folder
from recoup.cli.data.spec import DataSpec, unknown_split
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SPLITS = ("train", "test", "calibration", "validation")
SPLIT_SEED = 0
# Of every hundred training images so many are for calibration.
CALIBRATION_PERCENT = 95
SOLUTION = "LOC_val_solution.csv"
LARGEST_SOLUTION = 64 << 20  # bytes; the official file has 2.5 million


def open_imagenet(spec: DataSpec, input: InputSpec) -> FolderImages:
    """The images and labels of a split of ImageNet; the published validation images when no split is named."""
    split = spec.split or "test"
    if split not in SPLITS:
        raise unknown_split(spec, SPLITS)
    if not spec.place:
        raise UsageError(f"'{spec.text}' does not say where the images are. Write imagenet:DIR, with @train if wanted.")
    root = Path(spec.place)
    if split == "test":
        return _published_validation(spec, root, input)
    images = _class_folder(spec, root / "train", input)
    if split == "train":
        return images
    shuffled = torch.randperm(images.count, generator=torch.Generator().manual_seed(SPLIT_SEED))
    boundary = images.count * CALIBRATION_PERCENT // 100
    rows = shuffled[:boundary] if split == "calibration" else shuffled[boundary:]
    if not len(rows):
        raise DataError(
            f"'{spec.text}': {images.count} training images leave none for {split}. Use the whole data set."
        )
    return images.part(f"imagenet@{split}", rows)


def _published_validation(spec: DataSpec, root: Path, input: InputSpec) -> FolderImages:
    folder = root / "val"
    if folder.is_dir() and (loose := image_files(folder)):
        labels = _labels_by_name(spec, root, loose)
        return FolderImages("imagenet@test", tuple(loose), labels, input)
    return _class_folder(spec, folder, input)


def _class_folder(spec: DataSpec, folder: Path, input: InputSpec) -> FolderImages:
    if not folder.is_dir():
        raise DataError(
            f"'{spec.text}': there is no '{folder}'. Give the folder that holds ImageNet's train and val folders."
        )
    images = open_folder(DataSpec(spec.text, "folder", str(folder), ""), input)
    if images.labels is None:
        raise DataError(
            f"'{spec.text}': '{folder}' holds loose images and no class folders such as n01440764. Unpack the archive "
            "of every class into a folder of its own."
        )
    return images.part(f"imagenet@{spec.split or 'test'}", torch.arange(images.count))


def _labels_by_name(spec: DataSpec, root: Path, paths: list[Path]) -> torch.Tensor:
    """The class of every published validation image, which its name does not tell."""
    found = [place / SOLUTION for place in (root, root / "val") if (place / SOLUTION).is_file()]
    if not found:
        raise DataError(
            f"'{spec.text}': the validation images are not in class folders, and there is no {SOLUTION} beside them "
            "that says which class each is of. Add it, or sort them into class folders."
        )
    classes = _solution(found[0])
    number = {name: place for place, name in enumerate(sorted(set(classes.values())))}
    unknown = [path.name for path in paths if path.stem not in classes]
    if unknown:
        raise DataError(f"{found[0]} does not say of which class '{unknown[0]}' is ({len(unknown)} such images).")
    return torch.tensor([number[classes[path.stem]] for path in paths], dtype=torch.int64)


def _solution(path: Path) -> dict[str, str]:
    """The name of the class of every image, by the image's name: the first word of what the file says of it."""
    with open_regular(path, LARGEST_SOLUTION) as file:
        try:
            rows = list(csv.DictReader(file.read().decode().splitlines()))
            return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
        except (KeyError, IndexError, AttributeError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"'{path}' is no list of ImageId,PredictionString ({type(error).__name__}). Get the official one."
            ) from error
