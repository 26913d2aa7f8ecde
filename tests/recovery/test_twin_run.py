import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recoup.recovery import twin_run
from recoup.recovery.activation_store import size_of
from recoup.recovery.segments import segment_before
from recoup.recovery.twin_run import SegmentBatch
from recoup.surgery.apply import masked
from tests.oracles import records_of
from tests.recovery.bench import Written, bench, zoo_bench
from tests.zoo import ZOO, conv_bn, seeded

NAMES = pytest.mark.parametrize("name", ZOO)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@functools.cache
def in_zoo(name):
    return zoo_bench(name, seed=5)


class Block(nn.Module):
    """conv - bn - relu - conv - bn - add, twice."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 6)
        self.one = nn.Sequential(conv_bn(6, 8), conv_bn(8, 6, act=False))
        self.two = nn.Sequential(conv_bn(6, 8), conv_bn(8, 6, act=False))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.one(x))
        x = F.relu(x + self.two(x))
        return self.head(x.mean((2, 3)))


def images(samples=40):
    with seeded(0):
        return torch.randn(samples, 3, 8, 8).double()


@functools.cache
def blocks():
    with seeded(0):
        return bench(Block().double().eval(), images(), seed=5)


def everywhere(found):
    return range(len(found.split.batches))


def outputs(found, twin):
    """Original and pruned outputs of every batch."""
    pairs = list(twin.outputs(everywhere(found)))
    twin.close()
    return pairs


def point_of(found, layer):
    return next(point for point in found.schedule.points if point.consumer.name == layer)


def segment_at(found, layer):
    return segment_before(found.schedule, found.calibration.structure, point_of(found, layer))


def pruned(found):
    """The network at full size with the weights the twin run starts with."""
    return masked(found.model, found.start)


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@NAMES
def test_without_changes_both_networks_are_the_model(name):
    found = in_zoo(name)
    for inputs, (original, pruned) in zip(found.split.batches, outputs(found, found.twin({})), strict=True):
        with torch.no_grad():
            expected = inputs.call(found.model)
        expected = list(expected.values()) if isinstance(expected, dict) else [expected]
        assert_same(original, expected)
        assert all(torch.equal(a, b) for a, b in zip(original, pruned, strict=True))


@NAMES
def test_with_written_tensors_the_pruned_one_is_the_network_that_has_them(name):
    found = in_zoo(name)
    for inputs, (original, pruned) in zip(found.split.batches, outputs(found, found.twin()), strict=True):
        assert_same(pruned, found.whole(found.start, inputs))
        assert any(not torch.allclose(a, b) for a, b in zip(original, pruned, strict=True))


@NAMES
def test_without_memory_everything_is_the_same(name):
    found = in_zoo(name)
    twin = found.twin(memory=0)
    for point in found.schedule.points:
        for left, right in zip(twin.visit(point, [0]), found.twin().visit(point, [0]), strict=True):
            assert torch.equal(left.inputs, right.inputs)
            assert torch.equal(left.target, right.target)
    for left, right in zip(outputs(found, twin), outputs(found, found.twin()), strict=True):
        for side in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(left[side], right[side], strict=True))
    assert twin.peak == 0


def test_memory_keeps_to_its_limit():
    found = blocks()
    unlimited = found.twin()
    expected = outputs(found, unlimited)
    for limit in (unlimited.peak, unlimited.peak // 2, unlimited.peak // 10):
        twin = found.twin(memory=limit)
        assert all(torch.equal(a[1][0], b[1][0]) for a, b in zip(outputs(found, twin), expected, strict=True))
        assert twin.peak <= limit


def test_values_nobody_needs_any_more_are_not_kept():
    """At the end of a chain as long as you like, one value per batch is left."""

    def chain(length):
        layers = [layer for _ in range(length) for layer in (nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())]
        with seeded(0):
            return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *layers, nn.Conv2d(6, 4, 1)).double().eval()

    peaks = []
    for length in (2, 6):
        found = bench(chain(length), images(10))
        twin = found.twin()
        outputs(found, twin)
        peaks.append(twin.peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("name", ["plain", "flattened", "residual", "gates", "one-dim", "three-dim", "perceptron"])
def test_a_refit_batch_is_what_both_networks_have_at_the_layer(name):
    found = in_zoo(name)
    smaller, twin = pruned(found), found.twin()
    for point in found.schedule.points:
        for place, batch in zip(everywhere(found), twin.visit(point, everywhere(found)), strict=True):
            inputs = found.split.batches[place].args
            read, _ = records_of(smaller, point.consumer.name, inputs)
            _, made = records_of(found.model, point.consumer.name, inputs)
            torch.testing.assert_close(batch.inputs, read.detach(), **CLOSE)
            torch.testing.assert_close(batch.outputs, made, **CLOSE)
            if point.skip is None:
                assert torch.equal(batch.target, batch.outputs)
    twin.close()


def test_a_target_makes_up_for_what_its_skip_has_lost():
    found = blocks()
    point, twin = point_of(found, "two.1.0"), found.twin()
    norm = found.model.two[1][1]
    for place, batch in zip(everywhere(found), twin.visit(point, everywhere(found)), strict=True):
        added = norm(batch.target) - norm(batch.outputs)
        lost = skip_of(found.model, found.split.batches[place]) - skip_of(pruned(found), found.split.batches[place])
        torch.testing.assert_close(added.detach(), lost, rtol=1e-7, atol=1e-8)
    twin.close()


def skip_of(model, inputs):
    """What the second block is added to."""
    with torch.no_grad():
        x = model.stem(inputs.args[0])
        return F.relu(x + model.one(x))


def test_a_layer_may_be_asked_again_until_the_twin_run_moves_on():
    found = blocks()
    twin, point = found.twin(), found.schedule.points[1]
    first = [batch.inputs for batch in twin.visit(point, everywhere(found))]
    again = [batch.inputs for batch in twin.visit(point, everywhere(found))]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    twin.close()


def test_only_what_comes_after_a_written_tensor_drifts():
    found = blocks()
    twin = found.twin({"one.1.0.weight": found.model.one[1][0].weight.detach() * 2})
    assert not twin.drifts(point_of(found, "one.0.0"))
    assert all(twin.drifts(point_of(found, name)) for name in ("two.0.0", "two.1.0", "head"))
    twin.close()


def test_a_layer_whose_skip_alone_has_drifted_drifts():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(5, 6)
            self.c, self.d, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.c(torch.tanh(self.a(x))).relu() + self.d(torch.tanh(self.b(x)))))

    with seeded(0):
        found = bench(Beside().double().eval(), torch.randn(40, 5).double())
    twin = found.twin({"c.weight": found.model.c.weight.detach() * 2})
    assert twin.drifts(point_of(found, "d"))
    twin.close()
    twin = found.twin({"d.weight": found.model.d.weight.detach() * 2})
    assert not twin.drifts(point_of(found, "c"))
    twin.close()


def test_what_is_written_on_the_way_counts_from_there_on():
    found = blocks()
    twin = found.twin()
    point = point_of(found, "two.0.0")
    list(twin.visit(point, [0]))
    changed = {point.consumer.weight: found.start.weights[point.consumer.weight] * 1.5}
    twin.write(changed)
    expected = outputs(found, found.twin({**found.start.weights, **changed}))
    for (_, left), (_, right) in zip(outputs(found, twin), expected, strict=True):
        assert_same(left, right)


def test_a_segment_batch_is_what_enters_in_the_pruned_and_leaves_in_the_original_network():
    found = blocks()
    segment = segment_at(found, "two.1.0")
    twin = found.twin(segments=(segment,))
    for place, batch in zip(everywhere(found), twin.segment_batches(segment, everywhere(found)), strict=True):
        inputs = found.split.batches[place]
        (entry,), (exit_,) = batch.entries.values(), batch.exits.values()
        torch.testing.assert_close(entry, skip_of(pruned(found), inputs), **CLOSE)
        with torch.no_grad():
            x = skip_of(found.model, inputs)
            left = F.relu(x + found.model.two(x)).mean((2, 3))
        torch.testing.assert_close(exit_, left, **CLOSE)
        assert batch.size == inputs.size
    twin.close()


def test_a_segment_runs_with_other_tensors_and_changes_nothing():
    found = blocks()
    segment = segment_at(found, "two.1.0")
    twin = found.twin(segments=(segment,))
    (batch,) = twin.segment_batches(segment, [0])
    (before,) = twin.run(segment, batch.entries, {}).values()
    name = "two.1.0.weight"
    (other,) = twin.run(segment, batch.entries, {name: 2 * found.start.weights[name]}).values()
    (again,) = twin.run(segment, batch.entries, {}).values()
    assert not torch.allclose(before, other)
    assert torch.equal(before, again)
    twin.close()


def test_rewriting_a_segment_equals_a_fresh_run():
    found = blocks()
    segments = (segment_at(found, "one.1.0"), segment_at(found, "two.1.0"))
    changed = {name: 1.5 * found.start.weights.get(name, found.calibration.parameters[name]) for name in
               ("one.0.0.weight", "one.1.0.weight")}  # fmt: skip
    twin = found.twin(segments=segments)
    list(twin.segment_batches(segments[0], [0]))
    twin.rewrite(segments[0], changed)
    fresh = found.twin({**found.start.weights, **changed}, segments)
    for left, right in zip(
        twin.segment_batches(segments[1], everywhere(found)),
        fresh.segment_batches(segments[1], everywhere(found)),
        strict=True,
    ):
        assert_same(left.entries.values(), right.entries.values())
        assert_same(left.exits.values(), right.exits.values())
    for left, right in zip(outputs(found, twin), outputs(found, fresh), strict=True):
        assert_same(left[1], right[1])


def test_rewriting_without_memory_is_the_same():
    found = blocks()
    segment = segment_at(found, "one.1.0")
    changed = {"one.1.0.weight": 1.5 * found.start.weights["one.1.0.weight"]}
    results = []
    for memory in (0, 1 << 30):
        twin = found.twin(segments=(segment,), memory=memory)
        list(twin.segment_batches(segment, [0]))
        twin.rewrite(segment, changed)
        results.append(outputs(found, twin))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left[1][0], right[1][0])


def test_fewer_samples_are_bearable_within_less_memory():
    found = blocks()
    segment = segment_at(found, "one.1.0")
    twin = found.twin(segments=(segment,))
    many, few = twin.bearable(segment, 10 << 20), twin.bearable(segment, 1 << 20)
    assert few < many
    assert many == pytest.approx(10 * few, rel=0.1)
    assert twin.bearable(segment, 1) == 1
    twin.close()


def test_more_samples_can_be_stored_than_computed_with():
    found = blocks()
    segment = segment_at(found, "one.1.0")
    twin = found.twin(segments=(segment,))
    (batch,) = twin.segment_batches(segment, [0])
    size = sum(size_of(dict(side)) for side in (batch.entries, batch.exits))
    assert twin.storable(segment, 2 * size) == batch.size
    assert twin.storable(segment, 1 << 20) > twin.bearable(segment, 1 << 20)
    assert twin.storable(segment, 1) == 1
    twin.close()


def test_a_network_that_writes_into_what_others_read_runs_all_the_same():
    with seeded(0):
        found = bench(Written().double().eval(), images(), {"a": torch.arange(8) < 4})
    assert not found.schedule.is_pure
    before = [inputs.args[0].clone() for inputs in found.split.batches]
    for inputs, (original, pruned_) in zip(found.split.batches, outputs(found, found.twin()), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(original[0], found.model(inputs.args[0]), **CLOSE)
        assert_same(pruned_, found.whole(found.start, inputs))
        assert not torch.allclose(original[0], pruned_[0])
    assert all(torch.equal(a, b.args[0]) for a, b in zip(before, found.split.batches, strict=True))


def test_the_model_is_as_before():
    found = blocks()
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    twin = found.twin()
    list(twin.visit(found.schedule.points[0], [0]))
    twin.write({name: 2 * value for name, value in found.start.weights.items()})
    outputs(found, twin)
    assert all(torch.equal(value, before[name]) for name, value in found.model.state_dict().items())
    assert all(parameter.grad is None for parameter in found.host.parameters())


def segment_batch_of(samples):
    rows = torch.arange(samples * 2.0).view(samples, 2)
    return SegmentBatch({"x": rows, "shape": [4, 5], "scale": torch.ones(3)}, {"y": rows + 1})


def test_a_segment_batch_splits_into_parts_that_make_up_the_whole():
    batch = segment_batch_of(7)
    parts = list(batch.split(3))
    assert [part.size for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.entries["x"] for part in parts]), batch.entries["x"])
    assert torch.equal(torch.cat([part.exits["y"] for part in parts]), batch.exits["y"])
    assert all(part.entries["shape"] == [4, 5] and len(part.entries["scale"]) == 3 for part in parts[:2])


def test_samples_are_picked_from_everything_that_has_them():
    picked = segment_batch_of(7).pick(torch.tensor([4, 0]))
    assert picked.size == 2
    assert picked.entries["x"].tolist() == [[8.0, 9.0], [0.0, 1.0]]
    assert picked.exits["y"].tolist() == [[9.0, 10.0], [1.0, 2.0]]
    assert torch.equal(picked.entries["scale"], torch.ones(3))


def test_a_value_without_samples_does_not_count_them():
    batch = SegmentBatch({"x": torch.arange(6.0)}, {"loss": torch.tensor(1.0), "y": torch.arange(6.0)})
    few = batch.pick(torch.tensor([1, 4]))
    assert batch.size == 6 and few.size == 2
    assert few.exits["loss"] is batch.exits["loss"]
    assert [part.size for part in batch.split(4)] == [4, 2]
    assert SegmentBatch({}, {"loss": torch.tensor(1.0)}).size == 1


@pytest.mark.parametrize("reading", ["visit", "segment_batches"])
def test_batches_that_a_reader_leaves_behind_are_still_there(reading):
    found = blocks()
    segment = segment_at(found, "two.1.0")
    twin = found.twin(segments=(segment,))
    if reading == "visit":
        left_open = twin.visit(point_of(found, "two.1.0"), everywhere(found))
    else:
        left_open = twin.segment_batches(segment, everywhere(found))
    next(left_open)
    after = outputs(found, twin)
    for made, expected in zip(after, outputs(found, found.twin()), strict=True):
        assert_same(made[1], expected[1])


def test_batches_go_on_where_an_operation_failed(monkeypatch):
    found = blocks()
    twin, calls = found.twin(), []
    run = twin._run

    def failing(node, batch):
        calls.append(node)
        if len(calls) == 8:
            raise RuntimeError("no memory left")
        run(node, batch)

    monkeypatch.setattr(twin, "_run", failing)
    with pytest.raises(RuntimeError, match="no memory left"):
        list(twin.visit(point_of(found, "two.1.0"), everywhere(found)))
    for made, expected in zip(outputs(found, twin), outputs(found, found.twin()), strict=True):
        assert_same(made[1], expected[1])


def test_the_original_runs_every_layer_once_however_often_it_is_asked_for(monkeypatch):
    found = blocks()
    twin, point, calls = found.twin(), point_of(found, "two.1.0"), []
    run = twin_run.call
    monkeypatch.setattr(twin_run, "call", lambda node, look: calls.append(node.name) or run(node, look))
    for _ in range(2):
        list(twin.visit(point, everywhere(found)))
    outputs(found, twin)
    runs = calls.count(point.node)
    assert runs == 2 * len(everywhere(found))  # once in the original, once in the pruned network
