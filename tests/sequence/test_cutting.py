import functools

import pytest
import torch

from recoup.sequence.cutting import Cutter, agree
from recoup.sequence.stretches import stretches_of
from tests.sequence.bench import zoo_bench
from tests.zoo import ZOO

NAMES = pytest.mark.parametrize("name", ZOO)


@functools.cache
def in_zoo(name):
    found = zoo_bench(name, seed=5)
    return found, Cutter(found.calibration, found.keep, found.start.weights)


@NAMES
def test_what_is_left_of_a_tensor_is_what_the_plan_leaves(name):
    found, cutter = in_zoo(name)
    for tensor, value in found.start.weights.items():
        expected = value
        for piece in found.start.slices:
            if piece.tensor == tensor:
                expected = expected.index_select(piece.dim, piece.kept)
        assert torch.equal(cutter.tensor(tensor, value), expected)


@NAMES
def test_what_is_left_can_be_put_back(name):
    found, cutter = in_zoo(name)
    for tensor, value in found.start.weights.items():
        cut = cutter.tensor(tensor, value)
        assert torch.equal(cutter.restored(tensor, value, cut), value)
        changed = cutter.restored(tensor, value, cut + 1)
        assert torch.equal(cutter.tensor(tensor, changed), cut + 1)
        assert int((changed != value).sum()) == cut.numel()  # and nothing else


@NAMES
def test_a_cut_stretch_computes_what_the_whole_one_does(name):
    found, cutter = in_zoo(name)
    stretches = stretches_of(found.calibration, found.path, found.start.weights)
    walk = found.walk(stretches=tuple(stretches.values()))
    for stretch in stretches.values():
        assert cutter.runs(stretch)
        (passage,) = walk.passages(stretch, [0])
        whole = walk.run(stretch, passage.entries, {})
        entries = {key: cutter.value(key, value) for key, value in passage.entries.items()}
        cut = cutter.run(stretch, entries, cutter.tensors(stretch, walk.stored))
        for key, value in cut.items():
            torch.testing.assert_close(value, cutter.value(key, whole[key]), rtol=1e-9, atol=1e-9)
    walk.close()


def test_the_zoo_has_stretches_to_cut():
    counts = {name: len(stretches_of(in_zoo(name)[0].calibration, in_zoo(name)[0].path, in_zoo(name)[0].start.weights))
              for name in ZOO}  # fmt: skip
    assert sum(count > 0 for count in counts.values()) > len(ZOO) / 2
    assert counts["plain"] == 2


def test_values_without_channels_stay_whole():
    _, cutter = in_zoo("plain")
    assert cutter.value("nobody", 7) == 7
    x = torch.randn(2, 3)
    assert cutter.value("nobody", x) is x


def test_results_agree_up_to_rounding_and_in_shape():
    a = {"x": torch.ones(3), "count": 4}
    assert agree(a, {"x": torch.ones(3) + 1e-5, "count": 4})
    assert not agree(a, {"x": torch.ones(3) + 1e-2})
    assert not agree(a, {"x": torch.ones(4)})


def test_values_that_are_no_real_numbers_agree_only_if_equal():
    mask = {"x": torch.tensor([True, False])}
    assert agree(mask, {"x": torch.tensor([True, False])})
    assert not agree(mask, {"x": torch.tensor([True, True])})
    assert not agree({"x": torch.tensor([5000, 1])}, {"x": torch.tensor([5001, 1])})
