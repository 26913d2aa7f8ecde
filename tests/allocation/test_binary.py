"""The structural search against a measure whose answer is known."""

import contextlib
import dataclasses
import itertools

import pytest
import torch

import recoup
from recoup.allocation.binary import bisections, visiting_order
from recoup.allocation.widths import Widths
from recoup.channels.cost import cost
from recoup.errors import BudgetError, CalibrationError, LockedError, UsageError
from recoup.judge.acceptance import Verdict
from tests.test_laws import calibrated, calibration
from tests.torchvision_operators import define_missing_torchvision_operators
from tests.zoo import ZOO


def searched(name, evaluate, tolerance=1.0, width=8, **fields):
    _, seen = calibrated(name, width, recoup.Paper())
    return seen, search_of(dataclasses.replace(seen, method=recoup.Paper(**fields)), evaluate, tolerance)


def search_of(seen, evaluate, tolerance=1.0, **goal):
    return recoup.allocate(seen, recoup.rank(seen), recoup.Goal(tolerance=tolerance, evaluate=evaluate, **goal)).search


def channels(model):
    """Channels of the first two convolutions of the plain network."""
    return model[0][0][0].out_channels, model[0][2][0].out_channels


def test_the_bisection_finds_what_the_measure_allows():
    """One point is lost per channel of the first layer below 5 of its 8; the second layer is free of charge."""
    seen, found = searched("plain", lambda m: 90.0 - max(0, 5 - channels(m)[0]), classifier=True)
    first, second = (int(found.keep[g.channels].sum()) for g in seen.structure.prunable)
    assert first == 5
    assert second == 2  # 7/8 of its 10 channels may go: ceil(10/8) stay
    assert found.acceptance.base == 90.0
    assert found.drop == 0.0
    assert [t.share for t in found.trials] == [0.5, 0.75, 0.625, 0.5, 0.25, 0.125]
    assert [t.accepted for t in found.trials] == [False, True, True, True, True, True]


def test_a_drop_equal_to_the_tolerance_is_too_much():
    _, found = searched("plain", lambda m: 90.0 if channels(m) == (8, 10) else 89.0, tolerance=1.0, constraint="global")
    assert bool(found.keep.all())
    _, found = searched(
        "plain", lambda m: 90.0 if channels(m) == (8, 10) else 89.01, tolerance=1.0, constraint="global"
    )
    assert not bool(found.keep.all())


def test_the_step_constraint_splits_the_tolerance_by_layer():
    _, step = searched("plain", lambda _: 90.0, tolerance=1.0, classifier=True)
    assert [t.allowed for t in step.trials] == [0.5] * 3 + [1.0] * 3
    _, whole = searched("plain", lambda _: 90.0, tolerance=1.0, classifier=True, constraint="global")
    assert [t.allowed for t in whole.trials] == [1.0] * 6


def test_the_number_of_bisections_is_a_field():
    _, found = searched("plain", lambda _: 90.0, steps=5)
    assert len(found.trials) == 5
    assert found.trials[-1].share == pytest.approx(1 / 32)


def test_the_classifiers_inputs_are_spared_unless_asked_for():
    seen, _ = searched("plain", lambda _: 0.0)
    assert visiting_order(seen.traced, recoup.Paper()) == [("0.0.0",)]
    assert visiting_order(seen.traced, recoup.Paper(classifier=True)) == [("0.0.0",), ("0.2.0",)]


def test_orders_and_units():
    _, seen = calibrated("residual", 4, recoup.Paper())

    def order(**fields):
        return visiting_order(seen.traced, recoup.Paper(classifier=True, **fields))

    bottom_up = order(unit="layer")
    assert order(unit="layer", order="top-down") == bottom_up[::-1]
    shuffled = [order(unit="layer", order="random", seed=seed) for seed in range(6)]
    assert all(sorted(units) == sorted(bottom_up) for units in shuffled)
    assert len({tuple(units) for units in shuffled}) > 1
    assert shuffled[0] == order(unit="layer", order="random", seed=0)
    assert order() == order(unit="block") == [("a.0.0",), ("b.0.0",)]  # the stem and the stream stay whole


def test_a_block_is_searched_as_one():
    class Bottleneck(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1)
            self.a, self.b, self.c = torch.nn.Conv2d(8, 8, 1), torch.nn.Conv2d(8, 8, 1), torch.nn.Conv2d(8, 8, 1)

        def forward(self, x):
            x = torch.tanh(self.stem(x))
            return self.head(x + self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))).mean((2, 3))

    torch.manual_seed(0)
    model, x = Bottleneck().double().eval(), torch.randn(40, 3, 6, 6).double()
    seen = calibration(recoup.trace(model, x), [x], recoup.Paper(unit="block", classifier=False))
    found = search_of(seen, lambda _: 1.0)
    assert [t.groups for t in found.trials] == [("a", "b")] * 3
    assert [int(found.keep[seen.structure.group(n).channels].sum()) for n in ("a", "b")] == [1, 1]


def with_a_constant_channel(samples):
    entry = ZOO["plain"]
    model = entry.build(8)
    model[0][0][1].bias.data[2] = -100.0  # never passes the activation
    return calibration(recoup.trace(model, entry.batch()), [entry.batch(samples)], recoup.Paper())


def test_constant_channels_go_first_and_only_if_that_is_free():
    seen = with_a_constant_channel(100)
    found = search_of(seen, lambda m: 90.0 if channels(m)[0] >= 7 else 0.0)
    assert not found.keep[2]
    assert int(found.keep[:8].sum()) == 7
    assert found.trials[0].groups == ("constant channels",)
    refused = search_of(seen, lambda m: 90.0 if channels(m)[0] == 8 else 0.0)
    assert refused.trials[0].groups == ("constant channels",)
    assert bool(refused.keep.all())


def test_what_was_constant_on_few_samples_is_not_proposed_to_go_by_itself():
    found = search_of(with_a_constant_channel(40), lambda m: 90.0 if channels(m)[0] == 8 else 0.0)
    assert {trial.groups for trial in found.trials} == {("0.0.0",)}


def test_constant_channels_are_removed_exactly():
    entry = ZOO["flattened"]
    model = entry.build(8)
    model[0].bias.data[3] = -100.0
    result = recoup.prune(model, [entry.batch()], budget=recoup.Budget(width=0.875))
    assert result.model[0].out_channels == 7
    with torch.no_grad():
        torch.testing.assert_close(result.model(entry.batch()), model(entry.batch()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan")])
def test_a_tolerance_that_is_not_positive_is_refused(tolerance):
    with pytest.raises(UsageError, match="tolerance must be above 0 points"):
        searched("plain", lambda _: 1.0, tolerance=tolerance)


@pytest.mark.parametrize("value", [None, float("nan"), "good", torch.tensor(float("inf"))])
def test_a_measure_that_is_no_number_is_refused(value):
    with pytest.raises(CalibrationError, match="must return a finite number of points"):
        searched("plain", lambda _: value)


def test_groups_with_a_width_by_hand_are_not_visited_and_keep_it():
    _, seen = calibrated("plain", 8, recoup.Paper())
    both = dataclasses.replace(seen, method=recoup.Paper(classifier=True))
    found = search_of(both, lambda _: 90.0, widths={"0.2.0": 6})
    assert {trial.groups for trial in found.trials} == {("0.0.0",)}
    assert [trial.allowed for trial in found.trials] == [1.0] * 3
    first, second = (int(found.keep[group.channels].sum()) for group in seen.structure.prunable)
    assert (first, second) == (1, 6)


def test_no_unit_is_cut_below_the_least_width():
    _, seen = calibrated("plain", 8, recoup.Paper())
    both = dataclasses.replace(seen, method=recoup.Paper(classifier=True))
    found = search_of(both, lambda _: 90.0, min_width=3)
    assert [int(found.keep[group.channels].sum()) for group in seen.structure.prunable] == [3, 3]


def perceptron(*widths):
    """Three convolutions, then linear layers with all that may stand between them."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 6, 3), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(6, 5, 1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()]
    for before, after in itertools.pairwise((20, *widths)):
        layers += [torch.nn.Linear(before, after), torch.nn.BatchNorm1d(after), torch.nn.ReLU(), torch.nn.Dropout()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], 4)).double().eval()


def images(count=60):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def test_a_head_of_several_linear_layers_is_left_alone():
    model = perceptron(16, 12)
    traced = recoup.trace(model, images(2))
    assert traced.head == ("4", "8", "12")
    assert visiting_order(traced, recoup.Paper()) == [("0",), ("2",)]
    assert len(visiting_order(traced, recoup.Paper(classifier=True))) == 5
    for budget in (recoup.Budget(width=0.5), recoup.Budget(macs=0.5), recoup.Budget(parameters=0.9)):
        result = recoup.prune(model, [images()], budget=budget, method="paper")
        after = {row.name: row.after for row in result.report.groups}
        assert (after["4"], after["8"], after["12"]) == (5, 16, 12)
        assert after["0"] < 8 and after["2"] < 6
    both = recoup.prune(model, [images()], budget=recoup.Budget(width=0.5), method=recoup.Paper(classifier=True))
    assert [row.after for row in both.report.groups][:5] == [4, 3, 3, 8, 6]


class Between(torch.nn.Module):
    """Two convolutions and two linear layers, with `between` before the last one and `behind` after it."""

    def __init__(self, between=torch.nn.Identity(), behind=torch.nn.Identity()):  # noqa: B008  # stateless
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 6, 3)
        self.first, self.between = torch.nn.Linear(6, 8), between
        self.last, self.behind = torch.nn.Linear(8, 4), behind

    def forward(self, x):
        y = self.first(self.b(self.a(x).relu()).relu().mean((2, 3)))
        return self.behind(self.last(self.between(y)))


class Does(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.function(x, self.scale)


@pytest.mark.parametrize(
    "between",
    [
        torch.nn.PReLU(8),
        torch.nn.LayerNorm(8),
        torch.nn.GroupNorm(2, 8),
        Does(lambda y, _: y * y.sigmoid()),
        Does(lambda y, _: torch.maximum(y, -y)),
        Does(lambda y, _: torch.nn.functional.normalize(y)),
    ],
    ids=["prelu", "layer norm", "group norm", "swish", "maximum", "normalize"],
)
def test_a_head_goes_on_behind_whatever_is_made_of_one_layer(between):
    assert recoup.trace(Between(between).eval(), images(2).float()).head == ("b", "first")


@pytest.mark.parametrize(
    "behind",
    [
        Does(lambda y, _: torch.nn.functional.normalize(y)),
        Does(lambda y, scale: y * scale.exp()),
        Does(lambda y, _: y.softmax(1)),
    ],
    ids=["normalize", "scale", "softmax"],
)
def test_scores_are_a_heads_whatever_is_done_with_them(behind):
    assert recoup.trace(Between(behind=behind).eval(), images(2).float()).head == ("b", "first")


def test_a_head_ends_where_values_of_several_layers_meet():
    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.q, self.k, self.v = (torch.nn.Linear(6, 6) for _ in range(4))
            self.last = torch.nn.Linear(6, 4)

        def forward(self, x):
            x = self.a(x).relu()
            return self.last((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))

    assert recoup.trace(Attends().eval(), torch.randn(2, 5, 6)).head == ("v",)


def test_a_head_ends_where_the_models_inputs_are_added():
    """A table of words is no layer: what is added to it is not made of one layer alone."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.up, self.down = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
            self.last = torch.nn.Linear(8, 11)

        def forward(self, words):
            x = self.table(words)
            return self.last(x + self.down(self.up(x).relu()))

    assert recoup.trace(Words().eval(), torch.randint(11, (2, 5))).head == ("table",)


def test_a_width_by_hand_holds_in_the_head_too():
    result = recoup.prune(
        perceptron(16, 12), [images()], widths={"8": 9}, budget=recoup.Budget(width=0.5), method="paper"
    )
    assert [row.after for row in result.report.groups][:5] == [4, 3, 5, 9, 12]


@pytest.mark.parametrize("budget", [recoup.Budget(width=0.5), recoup.Budget(macs=0.5)])
def test_a_network_that_is_a_head_and_nothing_else_says_so(budget):
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)), torch.randn(40, 3)
    with pytest.raises(LockedError, match=r"nothing to prune.*classifier.*Paper\(classifier=True\)"):
        recoup.prune(model, [x], budget=budget, method="paper")
    whole = recoup.prune(model, [x], budget=recoup.Budget(width=1.0), method="paper")
    assert whole.model[0].out_features == 8


def test_a_budget_that_the_head_keeps_out_of_reach_names_it():
    with pytest.raises(BudgetError, match=r"read by the classifier, which classifier=True prunes"):
        recoup.prune(perceptron(400, 400), [images()], budget=recoup.Budget(parameters=0.3), method="paper")


def test_the_head_ends_where_two_ways_meet_or_a_convolution_stands():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

        def forward(self, x):
            x = self.a(x).relu()
            return self.c(x + self.b(x).tanh()).log_softmax(1)

    assert recoup.trace(Two(), torch.randn(2, 4)).head == ("a",)
    ends_in_a_convolution = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 6, 1), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 1)
    )
    assert recoup.trace(ends_in_a_convolution, images(2).float()).head == ("2",)


def refused(strategy, limit=1000):
    """The proposals of a strategy to which nothing is good enough."""
    found = [next(strategy)]
    with contextlib.suppress(StopIteration):
        while len(found) < limit:
            found.append(strategy.send(Verdict(0.0, 9.0, 9.0)))
    return found


def test_resnet50_is_searched_in_16_blocks_of_three_steps():
    define_missing_torchvision_operators()
    import torchvision  # once its operators are there

    traced = recoup.trace(torchvision.models.resnet50(weights=None).eval(), torch.randn(1, 3, 64, 64))
    rankings = {group.name: recoup.Ranking(torch.arange(group.width)) for group in traced.structure.groups}
    found = refused(bisections(traced, Widths(traced.structure, rankings), recoup.Paper(), 1.0))
    assert len(found) == 48
    units = list(dict.fromkeys(proposal.groups for proposal in found))
    blocks = [f"layer{stage}.{block}" for stage, count in enumerate((3, 4, 6, 3), 1) for block in range(count)]
    assert units == [(f"{block}.conv1", f"{block}.conv2") for block in blocks]
    assert found[-1].allowed == 1.0 and found[0].allowed == pytest.approx(1 / 16)
    visited = {name for unit in units for name in unit}
    others = [group.channels for group in traced.structure.prunable if group.name not in visited]
    assert others and all(bool(proposal.keep[channels].all()) for proposal in found for channels in others)
    by_layer = refused(bisections(traced, Widths(traced.structure, rankings), recoup.Paper(unit="layer"), 1.0))
    assert len(by_layer) > 3 * 32


@pytest.mark.parametrize("name", ["regnet_y_400mf", "efficientnet_b0", "mobilenet_v3_small"])
def test_blocks_with_gates_lose_most_of_their_macs(name):
    """A gate makes the channels that it scales together with a layer; they are no residual stream."""
    define_missing_torchvision_operators()
    import torchvision  # once its operators are there

    model = torchvision.models.get_model(name, weights=None).eval()
    structure = (traced := recoup.trace(model, torch.randn(1, 3, 64, 64))).structure
    keep = structure.keep_all()
    for group in (structure.group(name) for unit in visiting_order(traced, recoup.Paper()) for name in unit):
        keep[group.channels][1:] = False
    keep = structure.refill(keep, torch.arange(structure.width))
    whole, least = (cost(structure, traced.host, mask).macs for mask in (None, keep))
    assert least < 0.65 * whole


@pytest.mark.parametrize("left", [{"exclude": ["a.0.0"]}, {"only": ["stem.0"]}])
def test_a_choice_does_not_open_what_lies_outside_of_blocks(left):
    entry = ZOO["residual"]
    traced = recoup.trace(entry.build(8), entry.batch(2), **left)
    units = visiting_order(traced, recoup.Paper())
    assert units == ([("b.0.0",)] if "exclude" in left else [])


def test_a_choice_of_nothing_within_blocks_is_refused():
    model, data = ZOO["residual"].build(8), [ZOO["residual"].batch(40)]
    with pytest.raises(LockedError, match=r"lies outside of the residual blocks.*Paper\(unit='layer'\)"):
        recoup.prune(
            model, data, tolerance=5.0, evaluate=lambda _: 90.0, only=["stem.0"], method=recoup.Paper(classifier=True)
        )


def test_a_network_without_blocks_is_visited_layer_by_layer():
    _, seen = calibrated("plain", 8, recoup.Paper())
    assert seen.traced.blocks == ()
    by_block, by_layer = (visiting_order(seen.traced, recoup.Paper(unit=unit)) for unit in ("block", "layer"))
    assert by_block == by_layer == [("0.0.0",)]
