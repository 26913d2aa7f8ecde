"""Training: a seed decides all, a run can be resumed, and what is learnt can be opened again."""

import pytest
import torch
from benchmarks.train import Recipe, Shuffled, main, parse, save, trained
from torch import nn

import recoup
from recoup.cli.models import open_model
from tests.cli.data.test_cifar import cifar10  # noqa: F401 - a fixture


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def task():
    labels = torch.arange(90) % 3
    return 0.1 * torch.randn(90, 3, 12, 12) + nn.functional.one_hot(labels, 3)[:, :, None, None], labels


def is_same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_every_pass_has_whole_batches_of_other_images_with_their_labels():
    batches = Shuffled(torch.arange(10.0)[:, None], torch.arange(10), 4)
    torch.manual_seed(0)
    first, second = (list(batches) for _ in range(2))
    assert len(batches) == len(first) == 2 and all(len(labels) == 4 for _, labels in first)
    assert all(torch.equal(images[:, 0].long(), labels) for images, labels in first + second)
    orders = [torch.cat([labels for _, labels in each]).tolist() for each in (first, second)]
    assert orders[0] != orders[1] and all(len(set(order)) == 8 for order in orders)


def test_a_network_learns_and_the_seed_decides_how(capsys):
    images, labels = task()
    recipe = Recipe(epochs=8, batch=30)
    first, second = (trained(small(), images, labels, recipe) for _ in range(2))
    assert not first.training
    assert recoup.accuracy(first, [(images, labels)]) > 90
    assert is_same(first, second)
    assert not is_same(first, trained(small(), images, labels, Recipe(epochs=8, batch=30, seed=1)))
    assert "epoch 1 of 8: " in capsys.readouterr().err


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    images, labels = task()
    recipe = Recipe(epochs=4, batch=30)
    whole = trained(small(), images, labels, recipe)

    def stop(self, stage, done, total):
        if done == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("benchmarks.train.EpochLines.__call__", stop)
        trained(small(), images, labels, recipe, tmp_path / "half")
    assert (tmp_path / "half").exists()
    assert is_same(trained(small(), images, labels, recipe, tmp_path / "half"), whole)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_what_was_trained_can_be_opened_again(suffix, cifar10, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "weights" / f"net.{suffix}"
    words = ["--images", "20", "--epochs", "1", "--batch", "10", "--device", "cpu", "--resume", "--out", str(out)]
    main(["resnet20", "--data", f"cifar10:{cifar10}", *words])
    said = capsys.readouterr().out
    assert "trained on 20 images" in said and "validation " in said and "test " in said
    assert open_model("recoup:resnet20", out).model.conv1.weight.abs().sum() > 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_images_that_are_not_held_out_are_trained_on(cifar10, tmp_path, capsys):  # noqa: F811
    given = ["--data", f"cifar10:{cifar10}", "--epochs", "0", "--device", "cpu", "--out", str(tmp_path / "net.pt")]
    counts = []
    for held_out in ("validation", "none"):
        main(["resnet20", *given, "--held-out", held_out])
        said = capsys.readouterr().out
        counts.append(int(said.split("trained on ")[1].split()[0].replace(",", "")))
        assert ("validation " in said) == (held_out == "validation")
    assert counts[0] == round(0.8 * counts[1])


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(weights, path):
        path.write_bytes(b"half")
        raise OSError("full")

    monkeypatch.setattr("benchmarks.train.save_file", fail)
    with pytest.raises(OSError, match="full"):
        save(small(), tmp_path / "net.safetensors")
    assert not (tmp_path / "net.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "cifar10:x", "--out", "net.bin"], "--out must end in .safetensors or .pt, got net.bin"),
        (["--data", "cifar10:x@train", "--out", "net.pt"], "names a split; --held-out decides"),
    ],
)
def test_what_cannot_be_trained_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(["resnet20", *words])
    assert message in capsys.readouterr().err
