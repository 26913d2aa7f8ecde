"""ImageNet as it is published: class folders for training, a flat folder with a list of solutions for validation."""

import pytest
import torch

from recoup.cli.data import open_data
from recoup.cli.input_spec import unnormalised
from recoup.errors import DataError, UsageError
from tests.cli.data.test_folder import write

SMALL = unnormalised((3, 8, 8))
CLASSES = ("n01440764", "n01443537", "n01484850")
PER_CLASS = 40


@pytest.fixture
def imagenet(tmp_path):
    """A class has a colour of its own, and its validation images have it too."""
    for number, name in enumerate(CLASSES):
        for image in range(PER_CLASS):
            write(tmp_path / "train" / name / f"{name}_{image}.JPEG", (80 * number, image, 0))
    for image in range(6):
        write(tmp_path / "val" / f"ILSVRC2012_val_{image + 1:08}.JPEG", (80 * (image % 3), 0, 0))
    lines = [f"ILSVRC2012_val_{image + 1:08},{CLASSES[image % 3]} 1 2 3 4 " for image in range(6)]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *lines]))
    return tmp_path


def rows(root, split, **options):
    data = open_data(f"imagenet:{root}@{split}", SMALL, **options)
    batches = list(data)
    return data, torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def colours(images):
    return (images[:, 0].mean((1, 2)) * 255 / 80).round().long()


def test_training_images_have_the_number_of_their_folder(imagenet):
    data, images, labels = rows(imagenet, "train")
    assert data.name == "imagenet@train" and labels.tolist() == [0] * 40 + [1] * 40 + [2] * 40
    assert torch.equal(colours(images), labels)


def test_of_the_training_images_95_percent_calibrate_and_the_others_validate(imagenet):
    _, _, every = rows(imagenet, "train")
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    parts = {split: rows(imagenet, split) for split in ("calibration", "validation")}
    assert {split: len(labels) for split, (_, _, labels) in parts.items()} == {"calibration": 114, "validation": 6}
    assert torch.equal(parts["calibration"][2], every[order[:114]])
    assert torch.equal(parts["validation"][2], every[order[114:]])
    assert torch.equal(colours(parts["validation"][1]), parts["validation"][2])
    assert parts["calibration"][0].name == "imagenet@calibration"


def test_published_validation_images_get_their_class_from_the_list_of_solutions(imagenet):
    _, images, labels = rows(imagenet, "test")
    assert labels.tolist() == [0, 1, 2, 0, 1, 2] and torch.equal(colours(images), labels)


def test_sorted_validation_images_need_no_list(imagenet):
    (imagenet / "LOC_val_solution.csv").unlink()
    for path in sorted((imagenet / "val").glob("*.JPEG")):
        folder = imagenet / "val" / CLASSES[(int(path.stem[-8:]) - 1) % 3]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    _, images, labels = rows(imagenet, "test")
    assert labels.tolist() == [0, 0, 1, 1, 2, 2] and torch.equal(colours(images), labels)


def test_what_is_missing_is_said(imagenet, tmp_path):
    with pytest.raises(UsageError, match="imagenet has no split 'tset'. Did you mean 'test'"):
        open_data(f"imagenet:{imagenet}@tset", SMALL)
    with pytest.raises(UsageError, match="Write imagenet:DIR"):
        open_data("imagenet", SMALL)
    with pytest.raises(DataError, match="Give the folder that holds ImageNet's train and val"):
        open_data(f"imagenet:{tmp_path / 'train'}@train", SMALL)
    (imagenet / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1\n")
    with pytest.raises(DataError, match=r"does not say of which class 'ILSVRC2012_val_00000002.JPEG' is \(5 such"):
        open_data(f"imagenet:{imagenet}", SMALL)
    (imagenet / "LOC_val_solution.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no list of ImageId,PredictionString"):
        open_data(f"imagenet:{imagenet}", SMALL)
    (imagenet / "LOC_val_solution.csv").unlink()
    with pytest.raises(DataError, match="sort them into class folders"):
        open_data(f"imagenet:{imagenet}", SMALL)
