"""What propagating labels finds out: who makes a channel, who reads it, what is locked and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import trace
from tests.zoo import ZOO, conv_bn


def structure_of(name, width=6):
    entry = ZOO[name]
    return trace(entry.build(width), entry.batch(2)).structure


def one(structure, name):
    return structure.group(name)


def test_a_plain_network_has_one_group_per_layer():
    structure = structure_of("plain")
    assert [(g.name, g.width, g.free, g.consumers) for g in structure.groups] == [
        ("0.0.0", 6, 6, ("0.2.0",)),
        ("0.2.0", 8, 8, ("2",)),
        ("2", 4, 0, ()),
    ]
    assert structure.groups[2].reasons[0] == "the model returns it"


def test_batch_norms_follow_their_convolution():
    structure = structure_of("plain")
    followers = {s.tensor for s in structure.sites if s.dim == 0 and s.channel_of.tolist() == list(range(6))}
    assert followers == {f"0.0.1.{n}" for n in ("weight", "bias", "running_mean", "running_var")} | {"0.0.0.weight"}


def test_an_addition_couples_its_producers():
    structure = structure_of("residual")
    stream, wider = one(structure, "stem.0"), one(structure, "skip.0")
    assert set(stream.producers) == {"stem.0", "a.1.0"}
    assert set(stream.consumers) == {"a.0.0", "b.0.0", "skip.0"}
    assert set(wider.producers) == {"b.1.0", "skip.0"}


def test_flatten_gives_a_channel_several_inputs():
    structure = structure_of("flattened")
    (consumer,) = structure.consumers
    assert consumer.inputs.tolist() == [c for c in range(6) for _ in range(9)]


def test_zeros_beside_channels_go_with_the_channels_they_meet():
    entry = ZOO["zero-pad"]
    traced = trace(entry.build(6), entry.batch(2))
    group = one(traced.structure, "stem.0")
    assert (group.width, group.free) == (12, 12)
    assert "its code fixes a size" in traced.form.reason


def test_depthwise_convolutions_follow_their_channels():
    structure = structure_of("depthwise")
    (group,) = [g for g in structure.groups if g.name == "0.0"]
    assert group.consumers == ("2.2",)
    assert ("1.weight", 0) in {(s.tensor, s.dim) for s in structure.sites}


def test_a_concatenation_is_read_by_index_and_the_input_in_it_stays():
    structure = structure_of("concat")
    (consumer,) = structure.consumers
    a, b = one(structure, "a.0"), one(structure, "b.0")
    expected = [*range(a.start, a.start + 6), -1, -1, -1, *range(b.start, b.start + 7)]
    assert consumer.inputs.tolist() == expected


def test_a_layer_called_twice_has_one_set_of_channels():
    structure = structure_of("shared")
    group = one(structure, "stem.0")
    assert set(group.producers) == {"stem.0", "again"}
    assert set(group.consumers) == {"again", "head"}
    assert sum(p.weight == "again.weight" for p in structure.products) == 2


def test_gates_couple_and_a_single_gate_is_no_channel():
    structure = structure_of("gates")
    group = one(structure, "stem.0")
    assert set(group.producers) == {"stem.0", "up"}
    assert set(group.consumers) == {"down", "spot", "head"}
    spot = one(structure, "spot")
    assert spot.free == 0
    assert "spreads it over the channels of another tensor" in spot.reasons[0]


def test_a_free_parameter_along_the_channels_follows():
    structure = structure_of("scaled")
    assert ("gamma", 0) in {(s.tensor, s.dim) for s in structure.sites if s.channel_of.tolist() == list(range(6))}


def test_an_unknown_operation_locks_what_enters_it_and_is_named():
    structure = structure_of("unknown")
    assert one(structure, "a.0").free == 6
    locked = one(structure, "b")
    assert locked.free == 0
    assert any("in forward" in reason for reason in locked.reasons)


def test_a_size_in_the_code_is_put_right_in_a_standalone_graph_or_locks_the_group_that_needs_it():
    entry = ZOO["fixed"]
    free = trace(entry.build(6), entry.batch(2))
    assert [group.free for group in free.structure.groups] == [6, 6, 0]
    assert "its code fixes a size" in free.form.reason
    structure = trace(entry.build(6), entry.batch(2), keep_class=True).structure
    assert one(structure, "a.0").free == 6
    assert one(structure, "b.0").free == 0
    assert one(structure, "b.0").reasons[0].startswith("cutting it breaks the model's own code: its code fixes a size")


def test_an_intermediate_feature_that_is_returned_is_locked():
    structure = structure_of("several")
    assert one(structure, "c").reasons[0] == "the model returns it"
    assert one(structure, "a").free == 6
    assert set(one(structure, "a").producers) == {"a", "b"}


class Adversary(nn.Module):
    """A body between two convolutions, to see what it does to the channels of the first."""

    def __init__(self, body, width=8, after=8):
        super().__init__()
        self.body, self.a, self.b = body, nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(after, 4, 1)

    def forward(self, x):
        return self.b(self.body(self.a(x))).mean((2, 3))


def group_after(body, after=8, width=8):
    model = Adversary(body, width=width, after=after).double().eval()
    return trace(model, torch.randn(2, 3, 8, 8).double()).structure.groups[0]


@pytest.mark.parametrize(
    ("body", "after", "reason"),
    [
        (lambda x: x.softmax(1), 8, "softmax in forward runs over channels"),
        (lambda x: x.var(1, keepdim=True), 1, "var in forward mixes channels"),
        (lambda x: F.layer_norm(x, [8, 8, 8]), 8, "layer_norm in forward normalises over channels"),
        (lambda x: x.cumsum(1), 8, "cumsum in forward runs over channels"),
        (
            lambda x: F.max_pool2d(x.transpose(1, 3), (1, 2)).transpose(1, 3),
            4,
            "max_pool2d in forward runs over channels",
        ),
    ],
)
def test_what_mixes_channels_locks_them(body, after, reason):
    group = group_after(body, after)
    assert group.free == 0
    assert group.reasons[0].startswith(reason)


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (lambda x: x.softmax(2), 8),
        (lambda x: x.permute(0, 2, 3, 1).flip(1).permute(0, 3, 1, 2), 8),
        (lambda x: F.pad(x, (1, 2, 0, 1)), 8),
        (lambda x: F.interpolate(x, scale_factor=2), 8),
        (lambda x: x.flatten(2).unflatten(2, (8, 8)), 8),
        (lambda x: torch.stack([x, 2 * x]).sum(0), 8),
        (lambda x: torch.cat([x, -x], 1), 16),
        (lambda x: x.clamp(min=0) * x.amax((2, 3), keepdim=True), 8),
        (lambda x: F.dropout(x[:, :, 1:, ::2], training=False), 8),
        (lambda x: torch.where(x > 0, x, 0.1 * x), 8),
        (lambda x: x.roll(1, 2), 8),
    ],
)
def test_what_leaves_channels_apart_leaves_them_free(body, after):
    group = group_after(body, after)
    assert group.free == 8
    assert group.reasons == ()


class Computed(nn.Module):
    """A grouped convolution, and a weight that is computed: from parameters alone, or from the input."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.a, self.grouped = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4)
        self.b, self.c = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return F.conv2d(self.b(self.grouped(self.a(x))), self.factor(x) * self.c.weight)


def test_a_grouped_convolution_goes_by_whole_groups_and_a_computed_weight_is_stored():
    traced = trace(Computed(lambda x: 2).eval(), torch.randn(1, 3, 6, 6))
    assert [(g.name, g.width, g.free) for g in traced.structure.groups] == [
        ("a", 4, 4),
        ("b", 8, 8),
        ("folded.mul", 4, 0),
    ]
    assert traced.form.reason == "mul is computed from parameters, and the class would compute it again"


def test_a_weight_that_depends_on_the_input_locks_what_it_reads():
    structure = trace(Computed(lambda x: x.mean()).eval(), torch.randn(1, 3, 6, 6)).structure
    assert structure.group("b").reasons[0].startswith("conv2d in forward has a weight that depends on the input")


def test_a_functional_layer_without_a_place_for_a_bias_is_refitted_without_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.kernel = nn.Conv2d(3, 8, 1), nn.Parameter(torch.randn(4, 8, 1, 1))

        def forward(self, x):
            return F.conv2d(self.a(x), self.kernel)

    structure = trace(Model().eval(), torch.randn(1, 3, 6, 6)).structure
    assert structure.group("a").free == 8
    assert structure.consumers[0].biases == ()


def test_tied_weights_stay_tied():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.head = (nn.Linear(6, 6) for _ in range(4))
            self.c.weight = self.b.weight

        def forward(self, x):
            return self.head(self.c(F.relu(self.b(F.relu(self.a(x))))))

    model = Model().double().eval()
    result = recoup.prune(model, [torch.randn(50, 6).double()], budget=recoup.Budget(width=0.5))
    assert result.model.b.weight is result.model.c.weight
    assert result.model.b.weight.shape == (3, 3)


def test_blocks_are_the_groups_between_fork_and_addition():
    entry = ZOO["residual"]
    traced = trace(entry.build(4), entry.batch(2))
    assert traced.blocks == (("a.0.0",), ("b.0.0",))  # neither the stem nor the stream

    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = conv_bn(3, 6), nn.Conv2d(6, 4, 1)
            self.branch = nn.Sequential(conv_bn(6, 4, 1), conv_bn(4, 5), conv_bn(5, 6, 1, act=False))

        def forward(self, x):
            x = self.stem(x)
            return self.head(F.relu(x + self.branch(x))).mean((2, 3))

    blocks = trace(Bottleneck().eval(), torch.randn(1, 3, 8, 8)).blocks
    assert blocks == (("branch.0.0", "branch.1.0"),)


class Excited(nn.Module):
    """A block within a block; the inner one has a gate, which makes its hidden channels together with a layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = conv_bn(3, 6), nn.Conv2d(6, 4, 1)
        self.before, self.after = conv_bn(6, 7, 1), nn.Sequential(conv_bn(7, 5), conv_bn(5, 6, 1, act=False))
        self.expand, self.project = conv_bn(7, 12, 1), conv_bn(12, 7, 1, act=False)
        self.squeeze, self.excite = nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1)

    def forward(self, x):
        x = self.stem(x)
        inner = self.before(x)
        hidden = self.expand(inner)
        gate = self.excite(F.relu(self.squeeze(hidden.mean((2, 3), keepdim=True)))).sigmoid()
        inner = inner + self.project(hidden * gate)
        return self.head(F.relu(x + self.after(inner))).mean((2, 3))


def test_a_gate_makes_no_stream_and_an_inner_block_keeps_its_groups():
    model, x = Excited().eval(), torch.randn(1, 3, 8, 8)
    # The stream of the inner block, which `before` makes, lies inside of the outer one; it is a stream all the same.
    assert {frozenset(block) for block in trace(model, x).blocks} == {
        frozenset({"expand.0", "squeeze"}),
        frozenset({"after.0.0"}),
    }


def test_what_the_caller_leaves_alone_is_in_its_block_all_the_same():
    entry = ZOO["residual"]
    model, x = entry.build(4), entry.batch(2)
    assert trace(model, x, exclude=["a.0.0"]).blocks == trace(model, x).blocks == (("a.0.0",), ("b.0.0",))


def test_a_mask_is_refilled_only_where_a_layer_or_a_value_would_be_empty():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            left, right = self.first(x).split(4, 1)
            return self.last(torch.cat([left, F.avg_pool2d(right, 3, 1, 1)], 1))

    structure = trace(Halves(), torch.randn(2, 3, 8, 8)).structure
    assert structure.group("first").channels == slice(0, 8)
    order = torch.tensor([0, 1, 2, 3, 7, 6, 5, 4])
    for left, right in [("0000", "0000"), ("1111", "0000"), ("0000", "0101"), ("0100", "0010")]:
        keep = structure.keep_all()
        keep[:8] = torch.tensor([digit == "1" for digit in left + right])
        filled = structure.refill(keep, order)
        expected = [left if "1" in left else "1000", right if "1" in right else "0001"]
        assert filled[:8].tolist() == [digit == "1" for digit in "".join(expected)]
        assert bool(filled[8:].all())
