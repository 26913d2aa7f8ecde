from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.selection import (
    SELECTORS,
    Layer,
    Problem,
    Ranking,
    ask,
    backward,
    elimination,
    forward,
    l2,
    random,
)
from recoup.errors import IllConditionedError, UsageError
from tests.algebra.test_selectors import Told
from tests.oracles import greedy_by_brute_force, loss, rows_of


def layer(width, rows, outputs, seed, extra=0):
    """A random layer with `rows` inputs per channel and `extra` inputs that belong to none."""
    generator = torch.Generator().manual_seed(seed)
    d = width * rows + extra
    mixing = torch.randn(d, d, dtype=torch.float64, generator=generator)
    weight = torch.randn(d, outputs, dtype=torch.float64, generator=generator)
    channel_of = torch.cat([torch.arange(width).repeat_interleave(rows), torch.full((extra,), -1)])
    shuffle = torch.randperm(d, generator=generator)
    return Layer(mixing @ mixing.T / d, weight, channel_of[shuffle])


def problem(*layers, width, free=None, ridge=0.0):
    free = torch.ones(width, dtype=torch.bool) if free is None else free
    filters = torch.arange(width, dtype=torch.float64)[:, None]
    return Problem(width, layers, free, filters, ridge)


cases = st.tuples(st.integers(2, 6), st.integers(1, 4), st.integers(1, 30), st.integers(0, 10_000), st.integers(0, 3))


@given(cases)
@settings(max_examples=40, deadline=None)
def test_both_orders_are_those_of_brute_force(case):
    width, rows, outputs, seed, extra = case
    one = layer(width, rows, outputs, seed, extra)
    two = layer(width, 1, 3, seed + 1)
    for layers in ((one,), (one, two)):
        asked = problem(*layers, width=width)
        parts = [(each.covariance, each.weight, each.channel_of) for each in layers]
        assert forward(asked).order.tolist() == greedy_by_brute_force(parts, width, forward=True)
        assert backward(asked).order.tolist() == greedy_by_brute_force(parts, width, forward=False)


@given(cases, st.sampled_from([forward, backward]))
@settings(max_examples=30, deadline=None)
def test_the_loss_curve_is_the_error_of_solving_from_scratch(case, selector):
    width, rows, outputs, seed, extra = case
    one = layer(width, rows, outputs, seed, extra)
    ranking = selector(problem(one, width=width))
    total = loss(one.covariance, one.weight, torch.zeros(0).long())
    for n in range(width + 1):
        kept = rows_of(one.channel_of, ranking.order[:n].tolist())
        expected = loss(one.covariance, one.weight, kept) / total
        assert float(ranking.loss[n]) == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("staying", [[], [2, 7]])
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("selector", [forward, backward])
def test_the_order_does_not_depend_on_the_panel(selector, extra, staying, monkeypatch):
    layers = (layer(12, 3, 5, 3, extra), layer(12, 1, 20, 4, extra))
    free = torch.ones(12, dtype=torch.bool).index_fill(0, torch.tensor(staying, dtype=torch.long), value=False)
    asked = problem(*layers, width=12, free=free)
    whole = selector(asked)
    monkeypatch.setattr(elimination, "PANEL", 4)  # rows of channels that were taken go after every second one
    in_parts = selector(asked)
    assert torch.equal(in_parts.order, whole.order)
    torch.testing.assert_close(in_parts.loss, whole.loss)


@pytest.mark.parametrize("read", [0, 1, 5])
@pytest.mark.parametrize("selector", [forward, backward])
def test_the_panel_makes_no_difference_to_a_layer_that_reads_few_channels(selector, read, monkeypatch):
    few = layer(max(read, 1), 2, 5, seed=4)
    unread = Layer(few.covariance, few.weight, torch.full_like(few.channel_of, -1)) if not read else few
    asked = problem(layer(12, 3, 5, seed=3), unread, width=12, ridge=1e-6)
    whole = selector(asked)
    monkeypatch.setattr(elimination, "PANEL", 4)  # after some turns nothing is left that this layer reads
    in_parts = selector(asked)
    assert torch.equal(in_parts.order, whole.order)
    torch.testing.assert_close(in_parts.loss, whole.loss)


@pytest.mark.parametrize("selector", [forward, backward])
def test_what_is_not_filled_of_the_panel_counts_for_nothing(selector, monkeypatch):
    given = problem(layer(12, 3, 5, seed=3), width=12)
    before = selector(given)
    monkeypatch.setattr(elimination, "PANEL", 8)
    monkeypatch.setattr(elimination.Elimination, "_panel", lambda self: (self._U, self._T))  # as on a GPU
    after = selector(given)
    assert torch.equal(before.order, after.order)
    torch.testing.assert_close(before.loss, after.loss)


@pytest.mark.parametrize("name", SELECTORS)
def test_channels_that_must_stay_come_first(name):
    free = torch.tensor([True, False, True, False, True])
    asked = replace(problem(layer(5, 2, 4, seed=1), width=5, free=free), evidence=Told.random(5))
    ranking = ask(asked, name, "group")
    assert set(ranking.order[:2].tolist()) == {1, 3}


def test_forward_takes_staying_channels_into_account():
    """Channel 1 is a copy of channel 0, which stays: whatever its own gain, it is worth nothing."""
    G = torch.tensor([[2.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.1]], dtype=torch.float64)
    one = Layer(G, torch.ones(3, 1, dtype=torch.float64), torch.arange(3))
    free = torch.tensor([False, True, True])
    assert forward(problem(one, width=3, free=free)).order.tolist() == [0, 2, 1]


def test_constant_and_dependent_channels_come_last():
    X = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    X[:, 1] = 7.0
    X[:, 3] = X[:, 0] - 2 * X[:, 2]
    one = Layer(torch.cov(X.T), torch.ones(4, 2, dtype=torch.float64), torch.arange(4))
    ranking = forward(problem(one, width=4))
    assert ranking.order[:2].tolist() != [1, 3]
    assert 1 in ranking.order[2:].tolist()
    assert float(ranking.loss[2]) == pytest.approx(0, abs=1e-9)
    with_ridge = backward(problem(one, width=4, ridge=1e-8))
    assert with_ridge.order[-1] == 1


def test_backward_without_ridge_refuses_a_singular_covariance():
    X = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    X[:, 2] = X[:, 0] + X[:, 1]
    one = Layer(torch.cov(X.T), torch.ones(3, 1, dtype=torch.float64), torch.arange(3))
    with pytest.raises(IllConditionedError, match="layer1: .*Raise `ridge`"):
        ask(problem(one, width=3), "backward", "layer1")


def test_a_channel_that_no_layer_reads_is_worth_nothing():
    one = layer(3, 2, 4, seed=5)
    wider = Layer(one.covariance, one.weight, one.channel_of)
    for selector in (forward, backward):
        assert selector(problem(wider, width=4)).order[-1] == 3


def constant(width, rows, outputs):
    """A layer whose inputs never vary."""
    one = layer(width, rows, outputs, seed=0)
    return Layer(torch.zeros_like(one.covariance), one.weight, one.channel_of)


@pytest.mark.parametrize("selector", [forward, backward])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_a_layer_whose_inputs_never_vary_costs_nothing(selector, ridge):
    ranking = selector(problem(constant(4, 3, 5), width=4, ridge=ridge))
    assert sorted(ranking.order.tolist()) == [0, 1, 2, 3]
    assert torch.equal(ranking.loss, torch.zeros(5).double())


@pytest.mark.parametrize("selector", [forward, backward])
def test_a_layer_whose_inputs_never_vary_leaves_the_choice_to_the_others(selector):
    other = layer(4, 2, 5, seed=2)
    alone, beside = selector(problem(other, width=4)), selector(problem(constant(4, 3, 5), other, width=4))
    assert torch.equal(alone.order, beside.order)
    assert torch.equal(alone.loss, beside.loss)


def test_nothing_free_is_an_order_of_everything():
    asked = problem(layer(3, 1, 2, seed=0), width=3, free=torch.zeros(3, dtype=torch.bool))
    for selector in (forward, backward):
        assert sorted(selector(asked).order.tolist()) == [0, 1, 2]


def test_l2_looks_at_the_filters_and_random_at_the_seed():
    asked = problem(layer(5, 1, 2, seed=0), width=5)
    assert l2(asked).order.tolist() == [4, 3, 2, 1, 0]
    other = Problem(5, asked.layers, asked.free, asked.filters, 0.0, seed=1)
    assert torch.equal(random(asked).order, random(asked).order)
    assert not torch.equal(random(asked).order, random(other).order)


def test_a_users_own_selector_may_return_a_plain_tensor():
    asked = problem(layer(3, 1, 2, seed=0), width=3)
    ranking = ask(asked, lambda p: torch.arange(p.width).flip(0), "group")
    assert isinstance(ranking, Ranking)
    assert ranking.order.tolist() == [2, 1, 0]


@pytest.mark.parametrize("answer", [torch.tensor([0, 0, 1]), torch.tensor([0, 1]), torch.tensor([0.0, 1.0, 2.0])])
def test_a_selector_that_returns_no_ranking_is_told_so(answer):
    with pytest.raises(UsageError, match="stem: the selector must return each of the 3 channel numbers once"):
        ask(problem(layer(3, 1, 2, seed=0), width=3), lambda _: answer, "stem")


def test_a_selector_that_drops_what_must_stay_is_told_so():
    asked = problem(layer(3, 1, 2, seed=0), width=3, free=torch.tensor([True, True, False]))
    with pytest.raises(UsageError, match="1 channels that are not `free` first"):
        ask(asked, lambda _: torch.arange(3), "stem")


def test_an_unknown_selector_is_named_with_the_nearest_one():
    with pytest.raises(UsageError, match="unknown selector 'foward'.*Did you mean 'forward'"):
        ask(problem(layer(2, 1, 1, seed=0), width=2), "foward", "stem")


def with_combinations(seed=0):
    """Seven inputs, of which the third is a copy, the fifth a combination and the last one constant."""
    X = torch.randn(80, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    X[:, 2], X[:, 4], X[:, 6] = X[:, 0], X[:, 1] - 3 * X[:, 3], 1.5
    centred = X - X.mean(0)
    weight = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return Layer(centred.T @ centred / 80, weight, torch.arange(7))


@pytest.mark.parametrize("seed", range(4))
def test_without_a_ridge_the_ranking_says_how_many_channels_can_be_chosen(seed):
    one = with_combinations(seed)
    ranking = forward(problem(one, width=7))
    assert ranking.most == 4
    assert sorted(ranking.order[4:].tolist())[-1] == 6  # the constant one
    chosen = ranking.order[:4]
    assert int(torch.linalg.matrix_rank(one.covariance[chosen][:, chosen])) == 4
    assert float(ranking.loss[4]) == pytest.approx(0, abs=1e-12)
    assert forward(problem(one, width=7, ridge=1e-6)).most is None


def test_a_channel_can_be_chosen_if_one_of_the_layers_can_use_it():
    one, two = with_combinations(), layer(7, 1, 3, seed=5)
    assert forward(problem(one, two, width=7)).most == 7


def test_rows_that_stay_may_depend_on_each_other_without_a_ridge():
    free = torch.tensor([False, True, False, True, True, True, True])
    ranking = forward(problem(with_combinations(), width=7, free=free))
    assert ranking.order[:2].tolist() == [0, 2]
    assert ranking.most == 5  # both that stay, and three that are told apart


@pytest.mark.parametrize("most", [-1, 8])
def test_a_most_that_cannot_be_is_refused(most):
    given = problem(layer(7, 1, 2, seed=0), width=7)
    with pytest.raises(UsageError, match=f"a: of 7 channels {most} cannot be the most to choose"):
        ask(given, lambda _: Ranking(torch.arange(7), None, most), "a")


@given(st.integers(2, 8), st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_independent_channels_come_by_variance_times_the_energy_of_their_weights(width, outputs, seed):
    """The first of the two extreme cases of CaP: nothing can be compensated, so what a channel brings is its own."""
    generator = torch.Generator().manual_seed(seed)
    variance = torch.rand(width, dtype=torch.float64, generator=generator) + 0.1
    weight = torch.randn(width, outputs, dtype=torch.float64, generator=generator)
    expected = (variance * weight.square().sum(1)).argsort(descending=True)
    asked = problem(Layer(torch.diag(variance), weight, torch.arange(width)), width=width)
    assert torch.equal(forward(asked).order, expected)
    assert torch.equal(backward(asked).order, expected)


@given(st.integers(2, 8), st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_of_channels_that_are_multiples_of_one_a_single_one_is_enough(width, outputs, seed):
    """The other extreme case: any of them makes up for all."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(width, dtype=torch.float64, generator=generator)
    factors += factors.sign() / 2
    weight = torch.randn(width, outputs, dtype=torch.float64, generator=generator)
    ranking = forward(problem(Layer(torch.outer(factors, factors), weight, torch.arange(width)), width=width))
    assert ranking.most == 1
    assert float(ranking.loss[0]) == pytest.approx(1)
    assert ranking.loss[1:].tolist() == pytest.approx([0.0] * width, abs=1e-9)
