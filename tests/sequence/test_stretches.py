import functools

import pytest
import torch
from torch import nn

from recoup.sequence.cutting import Cutter
from recoup.sequence.stretches import adjustable, stretches_of
from tests.sequence.bench import bench, zoo_bench
from tests.zoo import seeded


def chain_of(length, width=6, inputs=5):
    layers = [layer for _ in range(length) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), *layers, nn.Linear(width, 3)).double().eval()


@functools.cache
def chain():
    """Four layers behind the first one, all of them cut."""
    with seeded(0):
        half = {str(2 * number): torch.arange(6) < 3 for number in range(4)}
        return bench(chain_of(3), torch.randn(60, 5).double(), half)


def layers_of(stretch):
    return sorted({name.split(".")[0] for name in stretch.tensors})


def test_every_layer_with_cut_inputs_ends_a_stretch_that_starts_where_they_are_made():
    found = stretches_of(chain().calibration, chain().path, chain().start.weights)
    assert [layers_of(stretch) for stretch in found.values()] == [["0", "2"], ["2", "4"], ["4", "6"], ["6", "8"]]
    assert all(stretch.stop.node == node for node, stretch in found.items())


def test_a_span_makes_them_longer():
    found = stretches_of(chain().calibration, chain().path, chain().start.weights, span=2)
    assert [layers_of(stretch) for stretch in found.values()] == [
        ["0", "2"], ["0", "2", "4"], ["2", "4", "6"], ["4", "6", "8"],
    ]  # fmt: skip


def test_layers_whose_inputs_are_whole_end_none():
    with seeded(0):
        found = bench(chain_of(3), torch.randn(60, 5).double(), {"2": torch.arange(6) < 3})
    stretches = stretches_of(found.calibration, found.path, found.start.weights)
    assert [layers_of(stretch) for stretch in stretches.values()] == [["2", "4"]]


def test_inputs_that_others_read_too_end_none():
    """The stream of a residual network has many readers; the channels inside a block have one."""
    found = zoo_bench("residual", seed=5)
    read_once = {g.name for g in found.calibration.structure.prunable if len(g.consumers) == 1}
    stretches = stretches_of(found.calibration, found.path, found.start.weights)
    ends = {stretch.stop.consumer.name for stretch in stretches.values()}
    assert read_once == {"a.0.0", "b.0.0", "skip.0"}
    assert ends == {"a.1.0", "b.1.0", "head"}


@pytest.mark.parametrize("kept", [3, 6])
def test_a_stretch_can_be_adjusted_at_the_size_that_is_left(kept):
    with seeded(0):
        mask = torch.arange(6) < kept
        found = bench(chain_of(1), torch.randn(60, 5).double(), {"0": torch.arange(6) < 3, "2": mask})
    written = dict(found.start.weights)
    stretch = next(iter(stretches_of(found.calibration, found.path, written).values()))
    walk = found.walk(stretches=(stretch,))
    work = adjustable(
        found.calibration, walk, stretch, Cutter(found.calibration, found.keep, written), written, found.sample
    )
    walk.close()
    assert [tuple(part.shape) for part in work.start()] == [(3, 5), (3,), (kept, 3), (kept,)]


def test_without_a_cutter_nothing_is_adjusted():
    found = chain()
    stretch = next(iter(stretches_of(found.calibration, found.path, found.start.weights).values()))
    walk = found.walk(stretches=(stretch,))
    assert adjustable(found.calibration, walk, stretch, None, {}, found.sample) is None
    walk.close()


def test_a_weight_that_two_calls_share_is_not_adjusted():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tied, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 5)

        def forward(self, x):
            x = torch.tanh(self.tied(x))
            inside = torch.tanh(self.a(x))
            again = torch.tanh(self.tied(x))
            return self.b(inside) + again

    with seeded(0):
        found = bench(Tied().double().eval(), torch.randn(60, 5).double(), {"a": torch.arange(6) < 4})
    written = dict(found.start.weights)
    stretches = stretches_of(found.calibration, found.path, written)
    (stretch,) = stretches.values()
    assert "tied.weight" in stretch.tensors
    walk = found.walk(stretches=(stretch,))
    work = adjustable(
        found.calibration, walk, stretch, Cutter(found.calibration, found.keep, written), written, found.sample
    )
    walk.close()
    assert work.tensors(work.start()).keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
