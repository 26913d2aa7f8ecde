import sys

import pytest
import torch
from sklearn.datasets import load_digits

from recoup.cli.data import open_data
from recoup.cli.input_spec import CIFAR, unnormalised
from recoup.errors import DataError, UsageError

INPUT = unnormalised((1, 8, 8))


def whole(spec: str) -> tuple[torch.Tensor, torch.Tensor]:
    return next(iter(open_data(spec, INPUT, batch_size=2000)))


def test_all_digits_scaled_to_one():
    images, labels = whole("digits")
    bundle = load_digits()
    torch.testing.assert_close(images[:, 0], torch.from_numpy(bundle.images).float() / 16, rtol=0, atol=0)
    assert labels.tolist() == bundle.target.tolist()


def test_splits_share_nothing_and_cover_everything():
    parts = [whole(f"digits@{split}") for split in ("train", "validation", "test")]
    assert [len(images) for images, _ in parts] == [1078, 359, 360]
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = whole("digits")
    assert torch.equal(torch.cat([images for images, _ in parts]), images[order])
    assert torch.equal(torch.cat([labels for _, labels in parts]), labels[order])


def test_name_and_counts():
    data = open_data("digits@test", INPUT, batch_size=100)
    assert (data.name, data.labelled, data.count, data.batches) == ("digits@test", True, 360, 4)


def test_requests_that_make_no_sense(monkeypatch):
    with pytest.raises(DataError, match=r"shape \(1, 8, 8\), but the model expects \(3, 32, 32\)"):
        open_data("digits", CIFAR)
    with pytest.raises(UsageError, match=r"digits has no split 'whole'. Use one of train, validation, test"):
        open_data("digits@whole", INPUT)
    with pytest.raises(UsageError, match="need no folder"):
        open_data("digits:somewhere", INPUT)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'recoup\[data\]'"):
        open_data("digits", INPUT)
