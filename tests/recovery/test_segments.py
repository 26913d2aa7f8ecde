import functools

import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.recovery.schedule import make_schedule
from recoup.recovery.segments import last_needs, segment_before, segments_of, whole_segment
from recoup.recovery.sequential import recover_in_sequence
from tests.recovery.bench import bench, zoo_bench
from tests.recovery.test_schedule import point_of, scheduled, through_zoo
from tests.zoo import conv_bn, seeded


def chain_of(length, width=6, inputs=5):
    layers = [layer for _ in range(length) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), *layers, nn.Linear(width, 3)).double().eval()


@functools.cache
def chain():
    """Four layers behind the first one, all of them cut."""
    with seeded(0):
        half = {str(2 * number): torch.arange(6) < 3 for number in range(4)}
        return bench(chain_of(3), torch.randn(60, 5).double(), half)


def layers_of(segment):
    return sorted({name.split(".")[0] for name in segment.tensors})


def test_every_layer_with_cut_inputs_ends_a_segment_that_starts_where_they_are_made():
    found = segments_of(chain().calibration, chain().schedule, chain().start.weights)
    assert [layers_of(segment) for segment in found.values()] == [["0", "2"], ["2", "4"], ["4", "6"], ["6", "8"]]
    assert all(segment.point.node == node for node, segment in found.items())


def test_in_a_chain_they_are_no_longer_than_that():
    found = segments_of(chain().calibration, chain().schedule, chain().start.weights, span=2)
    assert [layers_of(segment) for segment in found.values()] == [["0", "2"], ["2", "4"], ["4", "6"], ["6", "8"]]


def test_layers_whose_inputs_are_whole_end_none():
    with seeded(0):
        found = bench(chain_of(3), torch.randn(60, 5).double(), {"2": torch.arange(6) < 3})
    segments = segments_of(found.calibration, found.schedule, found.start.weights)
    assert [layers_of(segment) for segment in segments.values()] == [["2", "4"]]


def test_inputs_that_others_read_too_end_none():
    """The stream of a residual network has many readers; the channels inside a block have one."""
    found = zoo_bench("residual", seed=5)
    read_once = {g.name for g in found.calibration.structure.prunable if len(g.consumers) == 1}
    segments = segments_of(found.calibration, found.schedule, found.start.weights)
    ends = {segment.point.consumer.name for segment in segments.values()}
    assert read_once == {"a.0.0", "b.0.0", "skip.0"}
    assert ends == {"a.1.0", "b.1.0", "head"}


def test_a_recurrent_layer_is_refitted_with_what_reads_it():
    """It reads its own hidden units, and is in the segment; the state it begins with is filled there too."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.cells(x)[0][:, -1])

    with seeded(0):
        half, model = {"cells.weight_ih_l0": torch.arange(16) < 8}, Last().double().eval()
        found = bench(model, torch.randn(300, 3, 5).double(), half, joint_steps=3)
    (segment,) = segments_of(found.calibration, found.schedule, found.start.weights).values()
    assert layers_of(segment) == ["cells", "head"] and segment.point.consumer.name == "head"
    assert {node.name for node in segment.nodes} >= {"zeros", "gru"} and "zeros" not in segment.entries
    errors = []
    for steps in (0, 3):
        plan = recover_in_sequence(found.calibration, found.split, found.keep, found.start, joint_steps=steps)
        errors.append(found.reference.error(plan.weights))
    assert errors[1] < 0.8 * errors[0]


def test_a_span_reaches_back_over_blocks_that_end_in_an_addition():
    with seeded(0):
        model = nn.Sequential(*(Block(6) for _ in range(4)), nn.Linear(6, 3)).double().eval()
        halves = {f"{number}.a": torch.arange(8) < 4 for number in range(4)}
        found = bench(model, torch.randn(60, 6).double(), halves)
    for span in (1, 2, 3):
        segments = list(segments_of(found.calibration, found.schedule, found.start.weights, span=span).values())
        expected = [[str(block) for block in range(max(0, last - span + 1), last + 1)] for last in range(4)]
        assert [layers_of(segment) for segment in segments] == expected


class Block(nn.Module):
    """Two layers whose result is added to what they read."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def test_the_last_use_of_a_value_is_the_last_reader():
    schedule, _ = through_zoo("residual")
    last = last_needs(schedule)
    for node in schedule.nodes:
        readers = [user.name for user in schedule.nodes if node in user.all_input_nodes]
        readers += [point.node for point in schedule.points if point.skip == node.name]
        assert last.get(node.name) == (max(readers, key=schedule.place) if readers else None)


def test_what_enters_a_segment_is_needed_until_its_end():
    schedule, traced = through_zoo("residual")
    segment = segment_before(schedule, traced.structure, point_of(schedule, "a.1.0"))
    end = schedule.nodes[segment.end].name
    assert segment.entries == ("relu",)
    assert last_needs(schedule)["relu"] == "add"
    assert last_needs(schedule, [segment])["relu"] == end
    assert schedule.place("add") < segment.end


class ConvBlock(nn.Module):
    """conv - bn - relu - conv - add, as in a residual network."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = conv_bn(3, 6), conv_bn(6, 5), conv_bn(5, 6, act=False)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.two(self.one(x))))


def test_the_segment_of_a_block_goes_from_its_first_layer_to_the_next_one_behind_it():
    schedule, traced = scheduled(ConvBlock().eval(), torch.randn(2, 3, 8, 8))
    segment = segment_before(schedule, traced.structure, point_of(schedule, "two.0"))
    inside = [node.name for node in schedule.nodes[segment.start : segment.end] if node.op == "call_function"]
    assert inside == ["conv2d_1", "batch_norm_1", "relu_1", "conv2d_2", "batch_norm_2", "add", "relu_2"]
    assert schedule.nodes[segment.end].name == "conv2d_3"
    assert segment.entries == ("relu",)
    assert segment.exits == ("relu_2",)
    assert segment.tensors == ("one.0.weight", "one.0.bias", "two.0.weight", "two.0.bias")


def test_a_segment_may_start_earlier():
    schedule, traced = scheduled(ConvBlock().eval(), torch.randn(2, 3, 8, 8))
    segment = segment_before(schedule, traced.structure, point_of(schedule, "two.0"), schedule.place("conv2d"))
    assert segment.entries == ("x",)
    assert segment.exits == ("relu_2",)
    assert segment.tensors[0] == "stem.0.weight"


def test_the_last_segment_ends_at_the_output():
    schedule, traced = scheduled(ConvBlock().eval(), torch.randn(2, 3, 8, 8))
    segment = segment_before(schedule, traced.structure, point_of(schedule, "head"))
    assert schedule.nodes[segment.end].op == "output"
    assert segment.exits == ("conv2d_3",)
    assert segment.entries == ("relu", "relu_1")  # the stream, and what the last maker reads
    assert segment.tensors == ("two.0.weight", "two.0.bias", "head.weight", "head.bias")


def test_values_that_leave_a_segment_twice_are_exits_once():
    schedule, traced = through_zoo("residual")
    segment = segment_before(schedule, traced.structure, point_of(schedule, "a.0.0"))
    assert segment.exits == ("relu", "relu_1")


def test_what_leaves_the_whole_network_is_in_the_order_it_is_returned_in():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

        def forward(self, x):
            features = F.relu(self.a(x))
            return self.b(features), features

    traced = recoup.trace(Two(), torch.randn(3, 5))
    segment = whole_segment(make_schedule(traced.standalone.host.graph, traced.structure), traced.structure)
    by_name = {node.name: node for node in segment.nodes}
    assert [tuple(by_name[name].meta["val"].shape)[1] for name in segment.exits] == [4, 8]
