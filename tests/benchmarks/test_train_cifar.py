"""Training: images are moved, not mixed up; a seed decides all; what is learnt can be opened again."""

import itertools

import pytest
import torch
from benchmarks.train_cifar import SHIFT, Training, main, rate_at, shifted, trained
from torch import nn

import recoup
from recoup.cli.models import open_model
from tests.cli.data.test_cifar import cifar10  # noqa: F401 - a fixture


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_image_is_a_window_of_itself_with_a_rim_of_zeros():
    images = torch.rand(40, 3, 8, 8) + 1
    moved = shifted(images, generator())
    padded = nn.functional.pad(images, (SHIFT,) * 4)
    found = set()
    for before, after in zip(padded, moved, strict=True):
        windows = before.unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
        places = [
            (flip, int(place))
            for flip, picture in enumerate((after, after.flip(2)))
            for place in (windows == picture).flatten(1).all(1).nonzero()
        ]
        assert len(places) == 1
        found.add(places[0])
    assert {flip for flip, _ in found} == {0, 1} and len(found) > 20
    assert torch.equal(moved, shifted(images, generator())) and not torch.equal(moved, shifted(images, generator(1)))


def test_the_rate_rises_and_falls_to_nothing():
    rates = [rate_at(step, 100, 0.2) for step in range(100)]
    assert rates[0] < rates[4] and max(rates) == pytest.approx(0.2, rel=0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[5:])) and rates[-1] < 1e-3


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def test_a_network_learns_and_the_seed_decides_how():
    labels = torch.arange(90) % 3
    images = 0.1 * torch.randn(90, 3, 12, 12) + nn.functional.one_hot(labels, 3)[:, :, None, None]
    settings = Training(epochs=8, batch=30)
    first, second = (trained(small(), images, labels, settings) for _ in range(2))
    assert not first.training
    assert recoup.accuracy(first, [(images, labels)]) > 90
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = trained(small(), images, labels, Training(epochs=8, batch=30, seed=1))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_what_was_trained_can_be_opened_again(cifar10, tmp_path, monkeypatch, capsys):  # noqa: F811
    out = tmp_path / "weights" / "net.safetensors"
    words = ["--cifar", str(cifar10), "--images", "20", "--epochs", "1", "--batch", "10", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["train_cifar", *words])
    main()
    assert "trained on 20 images" in capsys.readouterr().out
    assert open_model("recoup:resnet20", out).model.conv1.weight.abs().sum() > 0
