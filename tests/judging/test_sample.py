import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from recoup.batches import Inputs, Stream
from recoup.errors import CalibrationError
from recoup.judging.sample import BATCH_BYTES, HELD_OUT, OWN_SHARE, blended, sample_of


def network():
    return nn.Linear(3, 2)


def numbered(sizes, width=3):
    """Batches of so many samples each, every sample filled with a number of its own."""
    samples = torch.arange(float(sum(sizes)))[:, None].expand(-1, width)
    return list(samples.split(list(sizes)))


def numbers_at(sample, places):
    return [int(row[0]) for place in places for row in sample.batches[place].args[0]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= HELD_OUT))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_seen_or_held_out_and_none_is_both(sizes):
    sample = sample_of(network(), numbered(sizes))
    seen, held = numbers_at(sample, sample.seen), numbers_at(sample, sample.held)
    assert not set(seen) & set(held)
    assert sorted(seen + held) == list(range(sum(sizes)))
    assert sorted([*sample.seen, *sample.held]) == list(range(len(sample.batches)))
    assert sample.size == sum(sizes)
    assert held
    assert seen


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= HELD_OUT))
@settings(max_examples=60, deadline=None)
def test_a_fifth_is_held_out_however_the_samples_come(sizes):
    """Small batches are put together first, so that nothing depends on how they were cut."""
    sample = sample_of(network(), numbered(sizes))
    assert len(numbers_at(sample, sample.held)) == sum(sizes) // HELD_OUT
    again = sample_of(network(), numbered([sum(sizes)]))
    assert numbers_at(sample, sample.held) == numbers_at(again, again.held)


def test_every_fifth_sample_of_a_batch_is_held_out():
    width = BATCH_BYTES["cpu"] // (4 * 10)  # ten samples are as much as a batch may hold
    sample = sample_of(nn.Linear(width, 1), numbered([10, 10, 5], width))
    assert [batch.size for batch in sample.batches] == [8, 2, 8, 2, 4, 1]
    assert (sample.seen, sample.held) == ((0, 2, 4), (1, 3, 5))
    assert numbers_at(sample, sample.held) == [4, 9, 14, 19, 24]


def test_batches_of_other_shapes_are_not_put_together():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    sizes = (8, 8, 9, 8)
    sample = sample_of(model, [torch.zeros(5, 3, size, size) for size in sizes])
    assert [tuple(batch.args[0].shape) for batch in sample.batches] == [
        (8, 3, 8, 8), (2, 3, 8, 8), (4, 3, 9, 9), (1, 3, 9, 9), (4, 3, 8, 8), (1, 3, 8, 8),
    ]  # fmt: skip


def test_batches_too_small_to_be_divided_are_held_out_whole():
    model = nn.Conv2d(3, 4, 3)
    batches = [torch.full((1, 3, 8, 8 + number % 2), float(number)) for number in range(11)]
    sample = sample_of(model, batches)
    assert numbers_of(sample, sample.held) == [4, 9]
    assert numbers_of(sample, sample.seen) == [0, 1, 2, 3, 5, 6, 7, 8, 10]
    sample = sample_of(model, batches[:2])
    assert (sample.seen, sample.held) == ((0,), (1,))


def numbers_of(sample, places):
    return [int(sample.batches[place].args[0].mean()) for place in places]


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_samples_are_refused(count):
    with pytest.raises(CalibrationError, match=rf"{count} calibration images are too few.*preset='paper'"):
        sample_of(network(), [torch.randn(count, 3)])


def test_the_least_that_will_do():
    sample = sample_of(network(), [torch.randn(HELD_OUT, 3)])
    assert [batch.size for batch in sample.batches] == [4, 1]


def test_no_batch_at_all_is_refused():
    with pytest.raises(CalibrationError, match="calibration gave no batch"):
        sample_of(network(), [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_named(value):
    batches = numbered([10, 10, 10])
    batches[1] = batches[1].clone()
    batches[1][3] = value
    with pytest.raises(CalibrationError, match="calibration batch 2 holds NaN or infinite inputs"):
        sample_of(network(), batches)


def test_labels_are_left_out_and_a_stream_is_read_once():
    stream = Stream((x, torch.zeros(len(x), dtype=torch.long)) for x in numbered([10, 10]))
    sample = sample_of(network(), stream)
    assert all(len(batch.args) == 1 for batch in sample.batches)
    assert sorted(numbers_at(sample, [*sample.seen, *sample.held])) == list(range(20))


def test_several_inputs_stay_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x, y):
            return self.a(x + y)

    pairs = [(x, -x) for x in numbered([7, 8, 9])]
    sample = sample_of(Two(), pairs)
    assert [batch.size for batch in sample.batches] == [20, 4]
    assert all(torch.equal(batch.args[0], -batch.args[1]) for batch in sample.batches)
    named = sample_of(Two(), [{"x": x, "y": y} for x, y in pairs])
    assert all(torch.equal(batch.kwargs["x"], -batch.kwargs["y"]) for batch in named.batches)


def test_a_message_can_name_the_batches_that_were_put_together():
    model = nn.Conv2d(3, 4, 3)
    sample = sample_of(model, [torch.randn(5, 3, size, 8) for size in (8, 8, 8, 9, 8, 8)])
    assert sample.numbers == ("1 to 3", "1 to 3", "4", "4", "5 to 6", "5 to 6")


def test_a_part_has_at_least_so_many_images_and_some_of_them_held_out():
    model = nn.Conv2d(1, 2, 3)
    whole = sample_of(model, [torch.randn(10, 1, 8 + number % 2, 8) for number in range(6)])
    for images, expected in ((1, 10), (10, 10), (11, 20), (45, 50), (60, 60), (999, 60)):
        part = whole.part(images)
        assert part.size == expected
        assert (part.seen, part.held) == (tuple(range(0, expected // 5, 2)), tuple(range(1, expected // 5, 2)))
        assert all(a is b for a, b in zip(part.batches, whole.batches, strict=False))
        assert len(part.numbers) == len(part.batches)


def test_judging_is_by_the_held_out_samples_blended():
    sample = sample_of(network(), numbered([50]))
    (judged,) = sample.judging()
    (held,) = (sample.batches[place].args[0] for place in sample.held)
    expected = OWN_SHARE * held + (1 - OWN_SHARE) * held.roll(1, 0)
    torch.testing.assert_close(judged.args[0], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(held[:, 0], torch.arange(4.0, 50.0, 5))  # as they came


def test_what_is_not_real_valued_or_not_of_the_batch_is_not_blended():
    tokens, image, scale = torch.arange(12).view(4, 3), torch.randn(4, 2), torch.randn(3, 5)
    mask, number = torch.tensor([True, False, True, False]), torch.tensor(2.0)
    mixed = blended(Inputs((tokens, image), {"scale": scale, "mask": mask, "number": number, "flag": True}))
    assert torch.equal(mixed.args[0], tokens)
    torch.testing.assert_close(mixed.args[1], 0.8 * image + 0.2 * image[[3, 0, 1, 2]], rtol=1e-6, atol=1e-6)
    assert torch.equal(mixed.kwargs["scale"], scale)
    assert torch.equal(mixed.kwargs["mask"], mask)
    assert torch.equal(mixed.kwargs["number"], number)
    assert mixed.kwargs["flag"] is True


def test_blending_keeps_the_mean_and_the_precision():
    x = torch.randn(6, 4, dtype=torch.float16)
    (mixed,) = blended(Inputs((x,), {})).args
    assert mixed.dtype == torch.float16
    torch.testing.assert_close(mixed.float().mean(0), x.float().mean(0), rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_every_held_out_image_is_blended_and_a_fifth_is_held_out_in_small_batches_too(size):
    width = BATCH_BYTES["cpu"] // (4 * size)  # no two batches fit together
    sample = sample_of(nn.Linear(width, 1), numbered([size] * 18, width))
    held = numbers_at(sample, sample.held)
    assert held == list(range(HELD_OUT - 1, 18 * size, HELD_OUT))
    values = [float(row[0]) for batch in sample.judging() for row in batch.args[0]]
    for own, value in zip(held, values, strict=True):
        partner = (value - OWN_SHARE * own) / (1 - OWN_SHARE)
        assert round(partner) in held and round(partner) != own
        assert partner == pytest.approx(round(partner), abs=1e-3)
