import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from recoup.errors import CalibrationError
from recoup.inputs.batches import Inputs, Stream
from recoup.inputs.split import BATCH_BYTES, HELD_OUT, OWN_SHARE, blended, split


def network():
    return nn.Linear(3, 2)


def numbered(sizes, width=3):
    """Batches of so many samples each, every sample filled with a number of its own."""
    samples = torch.arange(float(sum(sizes)))[:, None].expand(-1, width)
    return list(samples.split(list(sizes)))


def numbers_at(found, places):
    return [int(row[0]) for place in places for row in found.batches[place].args[0]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= HELD_OUT))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_fitted_to_or_held_out_and_none_is_both(sizes):
    found = split(network(), numbered(sizes))
    seen, held = numbers_at(found, found.fit), numbers_at(found, found.held)
    assert not set(seen) & set(held)
    assert sorted(seen + held) == list(range(sum(sizes)))
    assert sorted([*found.fit, *found.held]) == list(range(len(found.batches)))
    assert found.size == sum(sizes)
    assert held
    assert seen


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= HELD_OUT))
@settings(max_examples=60, deadline=None)
def test_a_fifth_is_held_out_however_the_samples_come(sizes):
    """Small batches are put together first, so that nothing depends on how they were cut."""
    found = split(network(), numbered(sizes))
    assert len(numbers_at(found, found.held)) == sum(sizes) // HELD_OUT
    again = split(network(), numbered([sum(sizes)]))
    assert numbers_at(found, found.held) == numbers_at(again, again.held)


def test_every_fifth_sample_of_a_batch_is_held_out():
    width = BATCH_BYTES["cpu"] // (4 * 10)  # ten samples are as much as a batch may hold
    found = split(nn.Linear(width, 1), numbered([10, 10, 5], width))
    assert [batch.size for batch in found.batches] == [8, 2, 8, 2, 4, 1]
    assert (found.fit, found.held) == ((0, 2, 4), (1, 3, 5))
    assert numbers_at(found, found.held) == [4, 9, 14, 19, 24]


def test_batches_of_other_shapes_are_not_put_together():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    sizes = (8, 8, 9, 8)
    found = split(model, [torch.zeros(5, 3, size, size) for size in sizes])
    assert [tuple(batch.args[0].shape) for batch in found.batches] == [
        (8, 3, 8, 8), (2, 3, 8, 8), (4, 3, 9, 9), (1, 3, 9, 9), (4, 3, 8, 8), (1, 3, 8, 8),
    ]  # fmt: skip


def test_batches_are_not_put_together_to_one_that_the_graph_does_not_take():
    model, asked = nn.Conv2d(3, 4, 3), []

    def serves(inputs):
        asked.append((tuple(inputs.args[0].shape), inputs.args[0].is_meta))
        return inputs.size < 25

    found = split(model, [torch.full((10, 3, 8, 8), float(number)) for number in range(5)], serves=serves)
    assert [batch.size for batch in found.batches] == [16, 4, 16, 4, 8, 2]
    assert found.numbers == ("1 to 2", "1 to 2", "3 to 4", "3 to 4", "5", "5")
    assert asked[:2] == [((20, 3, 8, 8), True), ((30, 3, 8, 8), True)]  # of the form alone, before anything is joined


def test_batches_too_small_to_be_divided_are_held_out_whole():
    model = nn.Conv2d(3, 4, 3)
    batches = [torch.full((1, 3, 8, 8 + number % 2), float(number)) for number in range(11)]
    found = split(model, batches)
    assert numbers_of(found, found.held) == [4, 9]
    assert numbers_of(found, found.fit) == [0, 1, 2, 3, 5, 6, 7, 8, 10]
    found = split(model, batches[:2])
    assert (found.fit, found.held) == ((0,), (1,))


def numbers_of(found, places):
    return [int(found.batches[place].args[0].mean()) for place in places]


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_samples_are_refused(count):
    with pytest.raises(CalibrationError, match=rf"{count} calibration images are too few.*method='paper'"):
        split(network(), [torch.randn(count, 3)])


def test_the_least_that_will_do():
    found = split(network(), [torch.randn(HELD_OUT, 3)])
    assert [batch.size for batch in found.batches] == [4, 1]


def test_no_batch_at_all_is_refused():
    with pytest.raises(CalibrationError, match="calibration gave no batch"):
        split(network(), [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_named(value):
    batches = numbered([10, 10, 10])
    batches[1] = batches[1].clone()
    batches[1][3] = value
    with pytest.raises(CalibrationError, match="calibration batch 2 holds NaN or infinite inputs"):
        split(network(), batches)


def test_labels_are_left_out_and_a_stream_is_read_once():
    stream = Stream((x, torch.zeros(len(x), dtype=torch.long)) for x in numbered([10, 10]))
    found = split(network(), stream)
    assert all(len(batch.args) == 1 for batch in found.batches)
    assert sorted(numbers_at(found, [*found.fit, *found.held])) == list(range(20))


def test_several_inputs_stay_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x, y):
            return self.a(x + y)

    pairs = [(x, -x) for x in numbered([7, 8, 9])]
    found = split(Two(), pairs)
    assert [batch.size for batch in found.batches] == [20, 4]
    assert all(torch.equal(batch.args[0], -batch.args[1]) for batch in found.batches)
    named = split(Two(), [{"x": x, "y": y} for x, y in pairs])
    assert all(torch.equal(batch.kwargs["x"], -batch.kwargs["y"]) for batch in named.batches)


def test_a_message_can_name_the_batches_that_were_put_together():
    model = nn.Conv2d(3, 4, 3)
    found = split(model, [torch.randn(5, 3, size, 8) for size in (8, 8, 8, 9, 8, 8)])
    assert found.numbers == ("1 to 3", "1 to 3", "4", "4", "5 to 6", "5 to 6")


def test_a_part_has_at_least_so_many_images_and_some_of_them_held_out():
    model = nn.Conv2d(1, 2, 3)
    whole = split(model, [torch.randn(10, 1, 8 + number % 2, 8) for number in range(6)])
    for images, expected in ((1, 10), (10, 10), (11, 20), (45, 50), (60, 60), (999, 60)):
        part = whole.part(images)
        assert part.size == expected
        assert (part.fit, part.held) == (tuple(range(0, expected // 5, 2)), tuple(range(1, expected // 5, 2)))
        assert all(a is b for a, b in zip(part.batches, whole.batches, strict=False))
        assert len(part.numbers) == len(part.batches)


def test_judging_is_by_the_held_out_samples_blended():
    found = split(network(), numbered([50]))
    (judged,) = found.held_out()
    (held,) = (found.batches[place].args[0] for place in found.held)
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
    found = split(nn.Linear(width, 1), numbered([size] * 18, width))
    held = numbers_at(found, found.held)
    assert held == list(range(HELD_OUT - 1, 18 * size, HELD_OUT))
    values = [float(row[0]) for batch in found.held_out() for row in batch.args[0]]
    for own, value in zip(held, values, strict=True):
        partner = (value - OWN_SHARE * own) / (1 - OWN_SHARE)
        assert round(partner) in held and round(partner) != own
        assert partner == pytest.approx(round(partner), abs=1e-3)


def test_without_held_out_images_batches_are_passed_on_as_they_come():
    batches = [(x, torch.zeros(len(x), dtype=torch.long)) for x in numbered([3, 1, 2])]
    found = split(network(), iter(batches), held_out=False)
    assert (found.batches, found.fit, found.held, found.size) == ((), (), (), 0)
    assert torch.equal(found.first.args[0], batches[0][0]) and len(found.first.args) == 1
    passed = list(found.fitting())
    assert [number for number, _ in passed] == [1, 2, 3]
    assert all(batch is given for (_, batch), given in zip(passed, batches, strict=True))


def test_the_batches_to_fit_to_come_with_the_numbers_of_the_callers():
    model = nn.Conv2d(3, 4, 3)
    found = split(model, [torch.randn(5, 3, size, 8) for size in (8, 8, 9)])
    assert [(number, batch.size) for number, batch in found.fitting()] == [("1 to 2", 8), ("3", 4)]
    assert found.first.size == 5


def test_few_images_will_do_where_none_is_held_out():
    assert len(list(split(network(), [torch.randn(1, 3)], held_out=False).fitting())) == 1
    with pytest.raises(CalibrationError, match="calibration gave no batch"):
        split(network(), [], held_out=False)


def endless():
    return (torch.randn(10, 3) for _ in itertools.count())


def test_batches_without_end_are_refused_when_half_of_the_memory_is_full(monkeypatch):
    monkeypatch.setattr("recoup.inputs.split.free_on", lambda device: 10 * 1000)
    message = r"42 calibration batches with 420 samples were taken, and there is no memory.*itertools\.islice"
    with pytest.raises(CalibrationError, match=message):
        split(network(), endless())
    assert split(network(), itertools.islice(endless(), 41)).size == 410


def test_batches_without_end_that_are_not_held_are_refused_too(monkeypatch):
    monkeypatch.setattr("recoup.inputs.split.MOST_STREAMED", 100)
    with pytest.raises(CalibrationError, match=r"11 calibration batches with 110 samples.*itertools\.islice"):
        list(split(network(), endless(), held_out=False).fitting())
    assert len(list(split(network(), itertools.islice(endless(), 10), held_out=False).fitting())) == 10
    known = [torch.randn(10, 3)] * 11  # a list has an end
    assert len(list(split(network(), known, held_out=False).fitting())) == 11
