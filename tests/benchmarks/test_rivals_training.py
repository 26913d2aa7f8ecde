"""Images of rivals are moved, not mixed up, and their learning rate rises and falls."""

import itertools

import pytest
import torch
from benchmarks.rivals.training import SHIFT, rate_at, shifted
from torch import nn


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
