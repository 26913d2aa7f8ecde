"""Fits in the space of rows: the numbers of `Joint`, which sums the same rows up, are the slow twin."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.few_rows import Collector, FewRows
from recoup.algebra.moments import Accumulator
from recoup.algebra.ridge import Joint
from recoup.errors import IllConditionedError

RIDGES = [1e-4, 0.1, 1.0, math.inf]


@st.composite
def few(draw):
    """No more rows than inputs, far from zero, with weights of which some may be zero, and a prior."""
    torch.manual_seed(draw(st.integers(0, 9999)))
    d, targets = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    n = draw(st.integers(1, d))
    rows = torch.randn(n, d + targets, dtype=torch.float64) @ torch.randn(d + targets, d + targets).double() + 3
    weights = torch.rand(n, dtype=torch.float64) * (torch.rand(n) < 0.8)
    weights[0] = 0.5
    return FewRows(rows, weights, d, draw(st.booleans())), torch.randn(d, targets, dtype=torch.float64)


@given(few())
@settings(max_examples=80, deadline=None)
def test_fits_and_errors_are_those_of_the_moments(case):
    pairs, prior = case
    slow = pairs.as_moments()
    found, expected = pairs.fits(prior, RIDGES), slow.fits(prior, RIDGES)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(one.bias, other.bias, rtol=1e-6, atol=1e-7)
        assert one.ridge == other.ridge and one.amount == pytest.approx(other.amount, abs=1e-12)
        assert one.condition >= 1
    torch.testing.assert_close(pairs.errors(expected), slow.errors(expected), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(pairs.variance(), slow.variance(), rtol=1e-8, atol=1e-10)
    for one, other in zip(pairs.means, slow.means, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert pairs.effective == pytest.approx(slow.effective)


def test_the_condition_is_never_above_the_true_one():
    torch.manual_seed(0)
    pairs = FewRows(torch.randn(4, 9).double(), torch.ones(4).double(), 7)
    for fit in pairs.fits(torch.zeros(7, 2).double(), [1e-6, 1e-2]):
        G = pairs.as_moments().second[:7, :7]
        true = torch.linalg.cond(G + fit.amount * torch.eye(7).double())
        assert 0.1 * true < fit.condition <= true * (1 + 1e-9)


def test_a_constant_input_keeps_its_prior_weight():
    torch.manual_seed(0)
    rows = torch.randn(3, 6).double()
    rows[:, 1] = 7.0
    (fit,) = FewRows(rows, torch.ones(3).double(), 5).fits(torch.full((5, 1), 0.25).double(), [0.1])
    assert fit.weight[1] == 0.25 and (fit.weight[[0, 2, 3, 4]] != 0.25).all()


def test_without_a_ridge_the_covariance_says_what_is_missing():
    rows = torch.randn(3, 6).double()
    with pytest.raises(IllConditionedError, match=r"conv7: the covariance of its 5 kept inputs is singular"):
        FewRows(rows, torch.ones(3).double(), 5).fits(torch.zeros(5, 1).double(), [0.1, 0.0], "conv7")


@pytest.mark.parametrize("rows", [0, 1])
def test_nothing_seen_leaves_the_prior(rows):
    """A single row has no spread about its mean; a bias can still meet it."""
    pairs = FewRows(torch.ones(rows, 4).double(), torch.ones(rows).double(), 3)
    (fit,) = pairs.fits(torch.full((3, 1), 0.5).double(), [0.1])
    assert torch.equal(fit.weight, torch.full((3, 1), 0.5).double())
    assert fit.bias.tolist() == [1 - 1.5 if rows else 0.0]
    assert float(pairs.errors([fit]).sum()) == 0.0


@pytest.mark.parametrize(("count", "kind"), [(5, FewRows), (6, Joint)])
def test_rows_are_kept_up_to_as_many_as_inputs(count, kind):
    torch.manual_seed(0)
    rows, weights = torch.randn(count, 7), torch.rand(count)
    found, sums = Collector(5, 2, "cpu"), Accumulator(7)
    for start in range(0, count, 2):
        part = slice(start, start + 2)
        found.update(rows[part], weights[part])
        sums.update(rows[part], weights[part])
    pairs, prior = found.pairs(), torch.randn(5, 2).double()
    assert isinstance(pairs, kind)
    (one,), (other,) = pairs.fits(prior, [0.1]), Joint(sums.moments(), 5).fits(prior, [0.1])
    torch.testing.assert_close(one.weight, other.weight, rtol=1e-6, atol=1e-8)
    assert pairs.effective == pytest.approx(sums.moments().effective)


def test_rows_without_weights_count_alike():
    rows = torch.randn(3, 7)
    plain, weighted = Collector(5, 2, "cpu"), Collector(5, 2, "cpu")
    plain.update(rows)
    weighted.update(rows, torch.full((3,), 2.0))
    prior = torch.zeros(5, 2).double()
    (one,), (other,) = plain.pairs().fits(prior, [0.1]), weighted.pairs().fits(prior, [0.1])
    torch.testing.assert_close(one.weight, other.weight)


def test_targets_of_parts_are_summed():
    """What a target may not see is left out of the covariance, and there is no such thing in the space of rows."""
    found = Collector(4, 2, "cpu", parts=torch.tensor([0, 0, 1, 1, 0, 1]))
    found.update(torch.randn(3, 6))
    assert isinstance(found.pairs(), Joint)
