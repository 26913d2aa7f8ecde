import functools

import torch
from torch import nn

from recoup.sequence.stretches import parts_of, stretches_of
from recoup.structure.route import whole_stretch
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


def test_in_a_chain_they_are_no_longer_than_that():
    found = stretches_of(chain().calibration, chain().path, chain().start.weights, span=2)
    assert [layers_of(stretch) for stretch in found.values()] == [["0", "2"], ["2", "4"], ["4", "6"], ["6", "8"]]


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


def test_a_span_reaches_back_over_blocks_that_end_in_an_addition():
    with seeded(0):
        model = nn.Sequential(*(Block(6) for _ in range(4)), nn.Linear(6, 3)).double().eval()
        halves = {f"{number}.a": torch.arange(8) < 4 for number in range(4)}
        found = bench(model, torch.randn(60, 6).double(), halves)
    for span in (1, 2, 3):
        stretches = list(stretches_of(found.calibration, found.path, found.start.weights, span=span).values())
        expected = [[str(block) for block in range(max(0, last - span + 1), last + 1)] for last in range(4)]
        assert [layers_of(stretch) for stretch in stretches] == expected


class Block(nn.Module):
    """Two layers whose result is added to what they read."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def parts_in(found, number=0):
    tensors = {**found.calibration.parameters, **found.start.weights}
    stretch = list(stretches_of(found.calibration, found.path, found.start.weights).values())[number]
    return stretch, parts_of(found.calibration, stretch, tensors)


def test_weight_and_bias_of_a_layer_are_one_part():
    _, parts = parts_in(chain())
    assert [part.names for part in parts] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]


def test_a_weight_that_two_calls_share_is_no_part():
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
    stretch, parts = parts_in(found)
    assert "tied.weight" in stretch.tensors
    assert {name for part in parts for name in part.names} == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_weight_and_bias_that_are_not_in_line_are_two_parts():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv1d(4, 8, 1)
            self.up = nn.ConvTranspose1d(8, 12, 2, groups=4)
            self.b = nn.Conv1d(12, 3, 1)

        def forward(self, x):
            return self.b(torch.tanh(self.up(torch.tanh(self.a(x)))))

    with seeded(0):
        found = bench(Grouped().double().eval(), torch.randn(40, 4, 5).double())
    whole = whole_stretch(found.path, found.calibration.structure)
    tensors = {**found.calibration.parameters, **found.start.weights}
    parts = parts_of(found.calibration, whole, tensors)
    assert [part.names for part in parts if part.node.startswith("conv_transpose")] == [("up.weight",), ("up.bias",)]
