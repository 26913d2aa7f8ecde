"""How rivals train: images are moved, not mixed up, the rate rises and falls, and products are narrow where asked."""

import itertools

import pytest
import torch
from benchmarks.rivals import __main__ as command
from benchmarks.rivals import training
from benchmarks.rivals.training import Batch, Schedule, batches, descend, held_out, minimise, rate_at, sgd
from torch import nn

from tests.benchmarks.rival_networks import SMALL, labelled, pictures, residual

# The side of the images here, and the most pixels by which they are shifted: an eighth.
SIDE, BORDER = 16, 2


def places_of(after, before):
    """Where a moved image lies in the one it was made of with a rim of zeros: flipped or not, and which window."""
    padded = nn.functional.pad(before, (BORDER,) * 4)
    windows = padded.unfold(1, SIDE, 1).unfold(2, SIDE, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    return [
        (flip, int(place))
        for flip, picture in enumerate((after, after.flip(2)))
        for place in (windows == picture).flatten(1).all(1).nonzero()
    ]


def test_every_image_of_a_batch_is_a_window_of_its_own_with_a_rim_of_zeros_and_keeps_its_label():
    images = torch.rand(40, 3, SIDE, SIDE) + 1
    schedule = Schedule(epochs=1, rate=0.1, batch=20)
    found = set()
    for batch in batches(images, torch.arange(40), schedule):
        for after, label in zip(batch.images, batch.labels, strict=True):
            places = places_of(after, images[label])
            assert len(places) == 1
            found.add(places[0])
    assert {flip for flip, _ in found} == {0, 1} and len(found) > 15
    again, other = (next(batches(images, torch.arange(40), Schedule(1, 0.1, seed=seed))).images for seed in (0, 1))
    assert torch.equal(again, next(batches(images, torch.arange(40), Schedule(1, 0.1))).images)
    assert not torch.equal(again, other)


def test_an_epoch_ends_with_its_last_batch_and_has_every_image_once():
    images = torch.arange(10.0).view(10, 1, 1, 1)
    found = list(batches(images, torch.arange(10), Schedule(2, 0.1, batch=5, augment=False)))
    assert [batch.ends_epoch for batch in found] == [False, True, False, True]
    assert all(torch.equal(batch.images.flatten(), batch.labels.float()) for batch in found)
    for epoch in (found[:2], found[2:]):
        assert sorted(torch.cat([batch.labels for batch in epoch]).tolist()) == list(range(10))
    assert [batch.rate for batch in found] == [rate_at(step, 4, 0.1) for step in range(4)]


def test_the_rate_rises_and_falls_to_nothing():
    rates = [rate_at(step, 100, 0.2) for step in range(100)]
    assert rates[0] < rates[4] and max(rates) == pytest.approx(0.2, rel=0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[5:])) and rates[-1] < 1e-3


def test_a_step_goes_down_at_the_rate_of_its_batch():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimiser = torch.optim.SGD([weight], 1.0)
    batch = Batch(torch.zeros(1), torch.zeros(1), 0.25, ends_epoch=False)
    assert float(descend(optimiser, lambda: (weight**2).sum(), batch)) == 9.0
    assert weight.item() == 3.0 - 0.25 * 2 * 3.0


def test_weights_decay_and_vectors_do_not():
    whole, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimiser = sgd([whole, vector, torch.ones(3)], Schedule(1, 0.1, momentum=0.0, decay=0.5))
    (0 * whole.sum() + 0 * vector.sum()).backward()
    optimiser.step()
    torch.testing.assert_close(whole.detach(), torch.full((2, 2), 1 - 0.1 * 0.5))
    assert torch.equal(vector.detach(), torch.ones(2))


def test_what_is_told_after_an_epoch_comes_once_for_each():
    weight, calls = nn.Parameter(torch.ones(1)), []
    minimise(
        lambda x, y: (weight * x.mean()).sum(),
        [weight],
        torch.ones(6, 1),
        torch.zeros(6),
        Schedule(3, 0.1, batch=2, augment=False),
        lambda: calls.append(weight.item()),
    )
    assert len(calls) == 3 and calls[0] > calls[1] > calls[2]


def test_judges_are_images_that_nobody_trains_on():
    images, labels = torch.arange(10.0), torch.arange(10)
    (trained, own), (judges, theirs) = held_out(images, labels, 0.25, seed=1)
    assert len(judges) == 3 and sorted(torch.cat([trained, judges]).tolist()) == list(range(10))
    assert torch.equal(trained, own.float()) and torch.equal(judges, theirs.float())
    assert not torch.equal(judges, held_out(images, labels, 0.25, seed=2)[1][0])


@pytest.mark.parametrize("name", SMALL)
def test_all_convolutions_that_train_have_narrow_products_where_it_is_asked_for(name, monkeypatch):
    seen = []

    def note(module, *_):
        if isinstance(module, nn.Conv2d) and module.training:
            seen.append(torch.is_autocast_enabled("cpu"))

    monkeypatch.setattr(training, "is_narrow", lambda device: True)
    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        model, images = residual(8), pictures(64)
        command.RECIPES[name].prune(model, images, labelled(model, images), SMALL[name])
    finally:
        handle.remove()
    assert seen and all(seen)


def test_products_are_narrow_on_a_gpu_alone():
    assert training.is_narrow(torch.device("cuda")) and not training.is_narrow(torch.device("cpu"))
