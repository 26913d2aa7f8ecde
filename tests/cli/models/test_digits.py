import pytest
import torch
from torch import nn

from recoup.cli.data import open_data
from recoup.cli.models import digits_resnet, train_digits
from recoup.cli.models.digits import _shifted
from recoup.cli.models.registry import open_model
from recoup.errors import UsageError


def whole(spec: str) -> tuple[torch.Tensor, torch.Tensor]:
    return next(iter(open_data(spec, open_model("recoup:digits").input, batch_size=2000)))


def test_learns_the_digits():
    torch.manual_seed(0)
    model = train_digits(digits_resnet(width=16), *whole("digits@train"), epochs=8, seed=0)
    images, labels = whole("digits@test")
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    assert accuracy > 0.97
    assert not model.training


def test_result_depends_on_the_seed_and_not_on_the_initial_weights():
    images, labels = (part[:128] for part in whole("digits@train"))
    first, again = (train_digits(digits_resnet(width=4), images, labels, epochs=2, seed=3) for _ in range(2))
    other = train_digits(digits_resnet(width=4), images, labels, epochs=2, seed=4)
    for key, value in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)
    assert not torch.equal(other.state_dict()["conv1.weight"], first.state_dict()["conv1.weight"])


def test_model_and_global_generator_are_left_alone():
    images, labels = (part[:128] for part in whole("digits@train"))
    model = digits_resnet(width=4).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with torch.no_grad():
        train_digits(model, images, labels, epochs=1, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert not model.training
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_progress_is_told_after_every_epoch():
    images, labels = (part[:128] for part in whole("digits@train"))
    told: list[tuple[int, float]] = []
    train_digits(digits_resnet(width=8), images, labels, epochs=6, seed=0, progress=lambda *step: told.append(step))
    assert [epoch for epoch, _ in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1][1] < told[0][1]


def test_a_batch_of_one_image_never_occurs():
    images, labels = whole("digits@train")
    train_digits(digits_resnet(width=2), images[:65], labels[:65], epochs=1, seed=0)


def test_shifts_move_by_at_most_one_pixel():
    images = torch.zeros(200, 1, 8, 8)
    images[:, :, 4, 4] = 1
    torch.manual_seed(0)
    places = {tuple(place[2:].tolist()) for place in _shifted(images).nonzero()}
    assert places == {(y, x) for y in (3, 4, 5) for x in (3, 4, 5)}


def test_width_and_shortcuts():
    model = digits_resnet(width=6, classes=4)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    assert isinstance(model.stage1.shortcut, nn.Identity)
    assert model.stage3.shortcut[0].weight.shape == (24, 12, 1, 1)


def test_impossible_requests():
    with pytest.raises(UsageError, match="width 0 leaves no channels"):
        digits_resnet(width=0)
    with pytest.raises(UsageError, match="0 epochs over 4 images with 3 labels"):
        train_digits(digits_resnet(4), torch.zeros(4, 1, 8, 8), torch.zeros(3).long(), epochs=0, seed=0)
