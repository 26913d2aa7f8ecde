import functools

import pytest
import torch

from recoup.recovery.cut_graph import CutGraph, agree
from recoup.recovery.segments import segments_of
from tests.recovery.bench import zoo_bench
from tests.zoo import ZOO

NAMES = pytest.mark.parametrize("name", ZOO)


@functools.cache
def in_zoo(name):
    found = zoo_bench(name, seed=5)
    return found, CutGraph(found.calibration, found.keep, found.start.weights)


@NAMES
def test_what_is_left_of_a_tensor_is_what_the_plan_leaves(name):
    found, cut_graph = in_zoo(name)
    for tensor, value in found.start.weights.items():
        expected = value
        for piece in found.start.slices:
            if piece.tensor == tensor:
                expected = expected.index_select(piece.dim, piece.kept)
        assert torch.equal(cut_graph.tensor(tensor, value), expected)


@NAMES
def test_what_is_left_can_be_put_back(name):
    found, cut_graph = in_zoo(name)
    for tensor, value in found.start.weights.items():
        cut = cut_graph.tensor(tensor, value)
        assert torch.equal(cut_graph.restored(tensor, value, cut), value)
        changed = cut_graph.restored(tensor, value, cut + 1)
        assert torch.equal(cut_graph.tensor(tensor, changed), cut + 1)
        assert int((changed != value).sum()) == cut.numel()  # and nothing else


@NAMES
def test_a_cut_segment_computes_what_the_whole_one_does(name):
    found, cut_graph = in_zoo(name)
    segments = segments_of(found.calibration, found.schedule, found.start.weights)
    twin = found.twin(segments=tuple(segments.values()))
    for segment in segments.values():
        assert cut_graph.runs(segment)
        (batch,) = twin.segment_batches(segment, [0])
        whole = twin.run(segment, batch.entries, {})
        entries = {key: cut_graph.value(key, value) for key, value in batch.entries.items()}
        cut = cut_graph.run(segment, entries, cut_graph.tensors(segment, twin.stored))
        for key, value in cut.items():
            torch.testing.assert_close(value, cut_graph.value(key, whole[key]), rtol=1e-9, atol=1e-9)
    twin.close()


def test_the_zoo_has_segments_to_cut():
    benches = {name: in_zoo(name)[0] for name in ZOO}
    counts = {
        name: len(segments_of(found.calibration, found.schedule, found.start.weights))
        for name, found in benches.items()
    }
    assert sum(count > 0 for count in counts.values()) > len(ZOO) / 2
    assert counts["plain"] == 2


def test_values_without_channels_stay_whole():
    _, cut_graph = in_zoo("plain")
    assert cut_graph.value("nobody", 7) == 7
    x = torch.randn(2, 3)
    assert cut_graph.value("nobody", x) is x


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
