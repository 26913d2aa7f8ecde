"""PASCAL VOC 2012: its lists say which images are meant, in which order."""

import pytest

from recoup.cli.data import open_data
from recoup.cli.input_spec import unnormalised
from recoup.errors import DataError, UsageError
from tests.cli.data.test_folder import write

SMALL = unnormalised((3, 8, 8))
NAMES = ("2007_000032", "2007_000027", "2008_000008")


@pytest.fixture
def voc(tmp_path):
    root = tmp_path / "VOCdevkit" / "VOC2012"
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for number, name in enumerate((*NAMES, "2012_000001")):
        write(root / "JPEGImages" / f"{name}.jpg", (60 * number, 0, 0), (30, 20))
    (root / "ImageSets" / "Main" / "train.txt").write_text(f"{NAMES[0]}\n{NAMES[1]}\n")
    (root / "ImageSets" / "Main" / "trainval.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (root / "ImageSets" / "Main" / "aeroplane_train.txt").write_text(f"{NAMES[0]} -1\n")
    return root


def colours(data):
    return [round(float(value) * 255 / 60) for batch in data for value in batch[:, 0].mean((1, 2))]


def test_a_list_decides_which_images_and_there_are_no_labels(voc):
    data = open_data(f"voc:{voc}", SMALL)
    assert (data.name, data.count, data.labelled) == ("voc@trainval", 3, False)
    assert colours(data) == [0, 1, 2]
    assert colours(open_data(f"voc:{voc}@train", SMALL)) == [0, 1]


def test_the_folder_above_will_do(voc):
    for above in (voc.parent, voc.parent.parent):
        assert open_data(f"voc:{above}", SMALL).count == 3


def test_what_is_missing_is_said(voc, tmp_path):
    with pytest.raises(UsageError, match="voc has no split 'test'"):
        open_data(f"voc:{voc}@test", SMALL)
    with pytest.raises(UsageError, match="Write voc:DIR"):
        open_data("voc", SMALL)
    with pytest.raises(DataError, match="no ImageSets/Main"):
        open_data(f"voc:{tmp_path / 'elsewhere'}", SMALL)
    with pytest.raises(DataError, match=r"val.txt' cannot be opened"):
        open_data(f"voc:{voc}@val", SMALL)
    (voc / "ImageSets" / "Main" / "val.txt").write_text("../../secret\n")
    with pytest.raises(DataError, match="no list of image names"):
        open_data(f"voc:{voc}@val", SMALL)
    (voc / "ImageSets" / "Main" / "val.txt").write_text("2007_000027\n2099_000001\n")
    with pytest.raises(DataError, match="1 of the 2 images in 'val.txt' are missing"):
        open_data(f"voc:{voc}@val", SMALL)
