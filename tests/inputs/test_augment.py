import pytest
import torch

from recoup.inputs import augment
from recoup.inputs.augment import augmented
from recoup.inputs.batches import Inputs


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def given(*tensors):
    return Inputs(tensors, {})


def moved(images, monkeypatch, seed=0):
    """Variations without blends."""
    monkeypatch.setattr(augment, "OWN_SHARE", 1.0)
    return augmented(given(images), generator(seed)).args[0]


def test_images_are_shifted_with_zeros_coming_in_and_mirrored(monkeypatch):
    images = torch.arange(1.0, 65.0).reshape(1, 1, 8, 8).expand(400, 1, 8, 8)
    found = moved(images, monkeypatch)
    padded = torch.nn.functional.pad(images[0, 0], (1, 1, 1, 1))
    shifted = [padded[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    expected = {tuple(image.flatten().tolist()) for shift in shifted for image in (shift, shift.flip(1))}
    assert {tuple(image.flatten().tolist()) for image in found} == expected


def test_channels_stay_together(monkeypatch):
    plain = torch.rand(20, 1, 16, 12, generator=generator())
    found = moved(torch.cat([plain, 2 * plain], dim=1), monkeypatch)
    assert torch.equal(found[:, 1], 2 * found[:, 0])


@pytest.mark.parametrize("shape", [(50, 3), (50, 4, 6), (50, 2, 3, 3, 3)])
def test_other_values_are_blended_with_their_neighbours(shape):
    values = torch.rand(shape, generator=generator())
    found = augmented(given(values), generator()).args[0]
    share = (found - values).flatten(1).norm(dim=1) / (values.roll(1, 0) - values).flatten(1).norm(dim=1)
    assert bool((share <= 1 - augment.OWN_SHARE + 1e-6).all()) and float(share.max()) > 0.4
    mixed = values + share.reshape(-1, *[1] * (len(shape) - 1)) * (values.roll(1, 0) - values)
    torch.testing.assert_close(found, mixed)


def test_what_is_not_real_or_not_a_sample_stays_as_it_is():
    tokens, table = torch.arange(6).reshape(3, 2), torch.rand(7, 2)
    found = augmented(given(tokens, table), generator())
    assert torch.equal(found.args[0], tokens) and torch.equal(found.args[1], table)


def test_the_same_generator_makes_the_same():
    images = torch.rand(5, 3, 8, 8)
    first, second = (augmented(given(images), generator(7)).args[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, augmented(given(images), generator(8)).args[0])
