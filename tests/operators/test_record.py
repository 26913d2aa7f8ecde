"""The operator table: what is in it, what is not, and how an operator is taught."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup.errors import LockedError
from recoup.operators import record
from recoup.operators.record import POINTWISE, UNKNOWN, known_operators, operator, operator_of, refresh_of
from recoup.operators.resizing import groups_at

aten = torch.ops.aten
HALF = recoup.Budget(width=0.5)


@torch.library.custom_op("recoup_tests::settle", mutates_args=())
def settle(x: Tensor) -> Tensor:
    """Every map less its largest value."""
    return x - x.amax((2, 3), keepdim=True)


@settle.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("recoup_tests::settle_groups", mutates_args=())
def settle_groups(x: Tensor, groups: int) -> Tensor:
    """Every group of maps less its largest value."""
    grouped = x.unflatten(1, (groups, -1))
    return (grouped - grouped.amax((2, 3, 4), keepdim=True)).flatten(1, 2)


@settle_groups.register_fake
def _(x, groups):
    return torch.empty_like(x)


@torch.library.custom_op("recoup_tests::weigh", mutates_args=())
def weigh(x: Tensor, weight: Tensor) -> Tensor:
    """Every map less its largest value, times a weight of its own."""
    return weight[:, None, None] * (x - x.amax((2, 3), keepdim=True))


@weigh.register_fake
def _(x, weight):
    return torch.empty_like(x)


LIBRARY = torch.library.Library("recoup_tests", "FRAGMENT")
LIBRARY.define("bend(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
LIBRARY.impl("recoup_tests::bend", lambda x: x.sin() + x, "CompositeExplicitAutograd")


def keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def grow(ctx, grown):
    return grown * (ctx.saved_tensors[0].cos() + 1)


torch.library.register_autograd("recoup_tests::bend", grow, setup_context=keep_inputs)
ours = torch.ops.recoup_tests


class Weigh(nn.Module):
    """Remembers how many channels it has, and insists on them."""

    def __init__(self, channels):
        super().__init__()
        self.channels, self.weight = channels, nn.Parameter(torch.rand(channels) + 0.5)

    def forward(self, x):
        return ours.weigh(x.reshape(-1, self.channels, *x.shape[2:]), self.weight)


class Between(nn.Module):
    """A layer whose channels meet what a test does to them, and one further up that they have nothing to do with."""

    def __init__(self, body, **extra):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.a = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 4, 1)
        for name, layer in extra.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.b(torch.tanh(self.body(self, self.a(F.relu(self.first(x)))))).mean((2, 3))


def images(samples=60):
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


def network(body, **extra):
    return Between(body, **extra).double().eval()


def groups_of(model):
    return {group.row.name: group.row for group in recoup.inspect(model, images(2)).groups}


@pytest.fixture
def table():
    """The table as it was before the test."""
    operators, refresh = dict(record._OPERATORS), dict(record._REFRESH)
    yield
    for held, before in ((record._OPERATORS, operators), (record._REFRESH, refresh)):
        held.clear()
        held.update(before)


def follow(call, constraints):
    """Each map is worked on by itself."""
    labels = constraints.labels_of(call.args[0])
    mixed = constraints.mix(labels, [2, 3], f"{call.site} runs over channels")
    return labels if mixed is None else mixed


def test_every_name_is_entered_once(table):
    before = dict(known_operators())
    assert len(before) > 150
    for name, known in before.items():
        with pytest.raises(ValueError, match=name):
            operator(name)(follow)
        assert known_operators()[name] is known
    assert dict(known_operators()) == before


def test_the_table_cannot_be_written_into_from_outside():
    with pytest.raises(TypeError):
        known_operators()["recoup_tests::settle"] = UNKNOWN


def test_every_name_is_that_of_an_operation():
    assert {name for name in known_operators() if not hasattr(aten, name)} == {
        POINTWISE,
        "getitem",
        "__matmul__",
        "transformers::grouped_mm_fallback",
    }


@pytest.mark.parametrize("name", [name for name, known in known_operators().items() if known.layer is not None])
def test_the_weight_of_a_layer_is_where_its_call_says(name):
    known = known_operators()[name]
    arguments = known.layer.arguments
    assert {"input", "weight"} <= set(arguments)
    assert known.weights == tuple(arguments.index(kind) for kind in arguments if kind in ("weight", "bias"))
    if known.layer.adds_bias:
        assert arguments.index("bias") == 2


def test_nothing_both_moves_elements_and_acts_on_them():
    assert not [name for name, known in known_operators().items() if known.is_movement and known.is_pointwise]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.sin.default, POINTWISE),
        (aten.sin_.default, POINTWISE),
        (aten.erf.default, POINTWISE),
        (aten.conv2d.padding, "conv2d"),
        (aten.add_.Tensor, "add"),
        (aten.add.Scalar, "add"),
        (torch.conv2d, "conv2d"),
        (F.linear, "linear"),
    ],
)
def test_an_operator_is_found_by_name_or_tag_whatever_its_overload(target, name):
    assert operator_of(target) is known_operators()[name]


def test_what_is_in_no_table_and_has_no_tag_is_unknown():
    assert operator_of(ours.settle.default) is UNKNOWN
    assert operator_of(aten.linalg_inv.default) is UNKNOWN
    assert operator_of(len) is UNKNOWN


def test_an_unknown_operator_locks_what_enters_it_and_names_itself():
    groups = groups_of(network(lambda m, h: ours.settle(h)))
    assert groups["a"].reasons[0].startswith("recoup_tests::settle in forward is not understood")
    assert groups["a"].locked == 8
    assert groups["first"].locked == 0
    assert "recoup_tests::settle in forward is not understood" in str(
        recoup.inspect(network(lambda m, h: ours.settle(h)), images(2))
    )


def test_a_network_with_an_unknown_operator_is_pruned_elsewhere():
    result = recoup.prune(network(lambda m, h: ours.settle(h)), [images()], budget=HALF)
    assert (result.model.first.out_channels, result.model.a.out_channels) == (5, 8)
    assert result.report.proof.difference < 1e-10


def test_where_an_unknown_operator_holds_everything_it_is_in_the_error():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.b(ours.settle(self.a(x)))

    with pytest.raises(LockedError, match="recoup_tests::settle in forward is not understood"):
        recoup.prune(Alone().double().eval(), [images()], budget=HALF)


@pytest.mark.parametrize(
    "body",
    [lambda m, h: ours.bend(h), lambda m, h: torch.erf(h), lambda m, h: torch.sinc(h), lambda m, h: torch.atan_(h)],
    ids=["of another library", "erf", "sinc", "in place"],
)
def test_the_pointwise_tag_is_enough(body):
    assert not {"recoup_tests::bend", "erf", "sinc", "atan"} & known_operators().keys()
    model = network(body)
    assert groups_of(model)["a"].locked == 0
    result = recoup.prune(model, [images()], budget=HALF)
    assert (result.model.first.out_channels, result.model.a.out_channels) == (5, 4)
    assert result.report.proof.difference < 1e-10


@pytest.mark.parametrize("method", ["best", "fast", recoup.Paper(classifier=True)], ids=["best", "fast", "paper"])
def test_an_operator_is_taught_by_one_entry(table, method):
    model = network(lambda m, h: ours.settle(h))
    assert groups_of(model)["a"].reasons[0].startswith("recoup_tests::settle in forward is not understood")

    @operator("recoup_tests::settle")
    def rule(call, constraints):
        return follow(call, constraints)

    assert operator_of(ours.settle.default).propagate is rule
    assert groups_of(model)["a"].locked == 0
    result = recoup.prune(model, [images()], budget=HALF, method=method)
    assert type(result.model) is Between
    assert (result.model.first.out_channels, result.model.a.out_channels) == (5, 4)
    assert result.report.proof.difference < 1e-10
    smaller = recoup.apply(model, result.plan)
    recoup.verify(model, result.plan, smaller, recoup.trace(model, images(2)).inputs)


def test_what_was_taught_is_forgotten_after_the_test():
    assert operator_of(ours.settle.default) is UNKNOWN
    assert not {"recoup_tests::settle", "recoup_tests::settle_groups", "recoup_tests::weigh"} & known_operators().keys()
    assert refresh_of(Weigh(3)) is None


def test_a_rule_that_does_not_suit_a_call_locks_it_by_name(table):
    operator("recoup_tests::settle")(lambda call, constraints: constraints.labels_of(call.args[1]))
    assert (
        groups_of(network(lambda m, h: ours.settle(h)))["a"]
        .reasons[0]
        .startswith("recoup_tests::settle in forward is not understood")
    )


def test_an_entry_says_how_a_call_changes_when_channels_go(table):
    """Four groups of two channels; the number of groups stands in the code, so the result is a graph of its own."""
    model = network(lambda m, h: ours.settle_groups(h, 4))
    assert groups_of(model)["a"].reasons[0].startswith("recoup_tests::settle_groups in forward is not understood")

    @operator("recoup_tests::settle_groups", resize=groups_at(1))
    def rule(call, constraints):
        labels, groups = constraints.labels_of(call.args[0]), call.args[1]
        tied = constraints.tie(constraints.channels_along(labels, 1, call.site).view(groups, -1), call.site)
        return tied.repeat_interleave(8 // groups).view(1, -1, 1, 1).expand(call.shape)

    assert (groups_of(model)["a"].before, groups_of(model)["a"].locked) == (4, 0)
    result = recoup.prune(model, [images()], budget=HALF)
    assert type(result.model).__name__ == "Standalone"
    (call,) = (node for node in result.model.graph.nodes if node.target is ours.settle_groups.default)
    assert call.args[1] == 2
    assert result.report.proof.difference < 1e-10


def test_an_entry_says_which_tensors_follow_and_what_a_module_remembers(table):
    model = network(lambda m, h: m.weigh(h), weigh=Weigh(8))
    assert groups_of(model)["a"].reasons[0].startswith("recoup_tests::weigh in weigh is not understood")

    def refresh(module, rows):
        assert len(rows) == len(module.weight)
        module.channels = len(module.weight)

    @operator("recoup_tests::weigh", weights=(1,), modules={Weigh: refresh})
    def rule(call, constraints):
        channels = constraints.channels_along(constraints.labels_of(call.args[0]), 1, call.site)
        constraints.site(call.args[1], 0, channels)
        return follow(call, constraints)

    result = recoup.prune(model, [images()], budget=HALF)
    assert type(result.model) is Between
    assert (result.model.a.out_channels, result.model.weigh.channels, len(result.model.weigh.weight)) == (4, 4, 4)
    assert result.report.proof.difference < 1e-10


LIBRARY.define("flip(Tensor x, int[] dims) -> Tensor")
LIBRARY.impl("flip", lambda x, dims: x - x.amax(1, keepdim=True), "CompositeExplicitAutograd")


def test_an_operator_of_another_library_is_not_taken_for_torchs_of_that_name():
    """It has the name and the arguments of a movement, but mixes channels."""
    assert operator_of(ours.flip.default) is UNKNOWN
    groups = groups_of(network(lambda m, h: ours.flip(h, [2])))
    assert "recoup_tests::flip in forward is not understood" in groups["a"].reasons[0]
