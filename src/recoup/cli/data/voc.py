"""PASCAL VOC 2012 as a source of images without labels: those that its lists name.

    DIR/JPEGImages/2007_000027.jpg
    DIR/ImageSets/Main/trainval.txt      one name a line; train.txt 5,717, val.txt 5,823, trainval.txt 11,540 of them

DIR may also be the folder above, which holds VOCdevkit/VOC2012. An image shows several classes, so there are no labels.
"""

from __future__ import annotations

from pathlib import Path

from recoup.cli.data.files import open_regular
from recoup.cli.data.folder import FolderImages, require_decodable
from recoup.cli.data.spec import DataSpec, unknown_split
from recoup.cli.input_spec import InputSpec
from recoup.errors import DataError, UsageError

SPLITS = ("train", "val", "trainval")
LARGEST_LIST = 16 << 20  # bytes; the longest of the official lists has 138,480
PLACES = ("", "VOC2012", "VOCdevkit/VOC2012")


def open_voc(spec: DataSpec, input: InputSpec) -> FolderImages:
    """The images of a list of VOC 2012; all 11,540 of `trainval` when none is named."""
    split = spec.split or "trainval"
    if split not in SPLITS:
        raise unknown_split(spec, SPLITS)
    require_decodable(spec, input)
    root = _root(spec)
    listed = root / "ImageSets" / "Main" / f"{split}.txt"
    paths = tuple(root / "JPEGImages" / f"{name}.jpg" for name in _names(listed))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"'{spec.text}': {len(missing)} of the {len(paths)} images in '{listed.name}' are missing, the first is "
            f"'{missing[0]}'. Unpack the whole archive again."
        )
    return FolderImages(f"voc@{split}", paths, None, input)


def _root(spec: DataSpec) -> Path:
    if not spec.place:
        raise UsageError(f"'{spec.text}' does not say where the images are. Write voc:DIR, with @train if wanted.")
    for place in PLACES:
        if (root := Path(spec.place) / place).joinpath("ImageSets", "Main").is_dir():
            return root
    raise DataError(
        f"'{spec.text}': there is no ImageSets/Main in '{spec.place}'. Give the folder VOC2012, which holds JPEGImages "
        "and ImageSets, or the one above it."
    )


def _names(path: Path) -> list[str]:
    with open_regular(path, LARGEST_LIST) as file:
        names = file.read().decode("ascii", errors="replace").split()
    if not names or not all(name.replace("_", "").isalnum() for name in names):
        raise DataError(f"'{path}' is no list of image names such as 2007_000027. Unpack the archive again.")
    return names
