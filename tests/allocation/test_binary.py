"""The structural search against a measure whose answer is known."""

import dataclasses

import pytest
import torch

import recoup
from recoup.allocation.binary import visiting_order
from recoup.errors import CalibrationError, UsageError
from tests.test_laws import calibrated, calibration
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

    bottom_up = order()
    assert order(order="top-down") == bottom_up[::-1]
    shuffled = [order(order="random", seed=seed) for seed in range(6)]
    assert all(sorted(units) == sorted(bottom_up) for units in shuffled)
    assert len({tuple(units) for units in shuffled}) > 1
    assert shuffled[0] == order(order="random", seed=0)
    assert sorted(name for unit in order(unit="block") for name in unit) == sorted(n for (n,) in bottom_up)


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
