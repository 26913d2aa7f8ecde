import pytest
import torch
from torch import nn

from recoup.recovery.parts import parts_of
from recoup.recovery.segments import segments_of, whole_segment
from tests.recovery.bench import bench
from tests.recovery.test_segments import chain
from tests.zoo import seeded


def parts_in(found, number=0):
    tensors = {**found.calibration.parameters, **found.start.weights}
    segment = list(segments_of(found.calibration, found.schedule, found.start.weights).values())[number]
    return segment, parts_of(found.calibration, segment, tensors)


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
    segment, parts = parts_in(found)
    assert "tied.weight" in segment.tensors
    assert {name for part in parts for name in part.names} == {"a.weight", "a.bias", "b.weight", "b.bias"}


@pytest.mark.parametrize("made", [8, 12])  # with as many outputs as inputs the shapes do not tell
def test_weight_and_bias_that_are_not_in_line_are_two_parts(made):
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv1d(4, 8, 1)
            self.up = nn.ConvTranspose1d(8, made, 2, groups=4)
            self.b = nn.Conv1d(made, 3, 1)

        def forward(self, x):
            return self.b(torch.tanh(self.up(torch.tanh(self.a(x)))))

    with seeded(0):
        found = bench(Grouped().double().eval(), torch.randn(40, 4, 5).double())
    whole = whole_segment(found.schedule, found.calibration.structure)
    tensors = {**found.calibration.parameters, **found.start.weights}
    parts = parts_of(found.calibration, whole, tensors)
    assert [part.names for part in parts if part.node.startswith("conv_transpose")] == [("up.weight",), ("up.bias",)]
