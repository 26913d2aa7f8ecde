import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.moments import Accumulator
from recoup.algebra.regression import Fitted, Joint, shrunk
from recoup.errors import IllConditionedError
from tests.oracles import least_squares

INFINITY = math.inf


def joint_of(A, T, centred=True, weights=None):
    sums = Accumulator(A.shape[1] + T.shape[1])
    sums.update(torch.cat([A, T], dim=1), weights)
    return Joint(sums.moments(), A.shape[1], centred)


def mean_squared_error(A, T, fitted):
    return (T - A @ fitted.weight - fitted.bias).square().mean(dim=0)


@st.composite
def regressions(draw):
    """Rows of inputs and targets that do not quite depend on them, far from zero, and a prior weight."""
    torch.manual_seed(draw(st.integers(0, 9999)))
    d, n = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    A = torch.randn(80, d, dtype=torch.float64) @ torch.randn(d, d, dtype=torch.float64) + 2
    T = A @ torch.randn(d, n, dtype=torch.float64) + torch.randn(80, n, dtype=torch.float64) - 5
    return A, T, torch.randn(d, n, dtype=torch.float64)


@given(regressions())
@settings(max_examples=60, deadline=None)
def test_without_a_ridge_it_is_least_squares_whatever_the_prior(case):
    A, T, prior = case
    (fitted,) = shrunk(joint_of(A, T), prior, [0.0])
    slope, intercept = least_squares(A, T)
    torch.testing.assert_close(fitted.weight, slope, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(fitted.bias, intercept, rtol=1e-6, atol=1e-6)
    assert (fitted.ridge, fitted.amount) == (0.0, 0.0)
    assert fitted.condition >= 1


@given(regressions())
@settings(max_examples=60, deadline=None)
def test_an_infinite_ridge_is_the_prior_with_the_bias_that_fits(case):
    A, T, prior = case
    (fitted,) = shrunk(joint_of(A, T), prior, [INFINITY])
    assert torch.equal(fitted.weight, prior)
    torch.testing.assert_close(fitted.bias, (T - A @ prior).mean(0), rtol=1e-10, atol=1e-10)
    assert fitted.ridge == INFINITY


@given(regressions(), st.sampled_from([1e-3, 0.1, 10.0]))
@settings(max_examples=60, deadline=None)
def test_a_ridge_minimises_the_error_plus_the_distance_from_the_prior(case, ridge):
    A, T, prior = case
    (fitted,) = shrunk(joint_of(A, T), prior, [ridge])
    assert fitted.amount == pytest.approx(ridge * float(A.var(dim=0, correction=0).mean()))
    unit = math.sqrt(fitted.amount * len(A)) * torch.eye(A.shape[1], dtype=torch.float64)
    design = torch.cat([A - A.mean(0), unit])
    expected = torch.linalg.lstsq(design, torch.cat([T - T.mean(0), unit @ prior])).solution
    torch.testing.assert_close(fitted.weight, expected, rtol=1e-6, atol=1e-8)


@given(regressions(), st.booleans(), st.sampled_from([0.0, 0.1, INFINITY]))
@settings(max_examples=60, deadline=None)
def test_the_error_is_the_mean_over_the_rows(case, centred, ridge):
    A, T, prior = case
    joint = joint_of(A, T, centred)
    (fitted,) = shrunk(joint, prior, [ridge])
    torch.testing.assert_close(joint.error(fitted), mean_squared_error(A, T, fitted), rtol=1e-7, atol=1e-9)


@given(regressions())
@settings(max_examples=40, deadline=None)
def test_the_error_on_other_rows_counts_what_the_bias_misses_there(case):
    A, T, prior = case
    (fitted,) = shrunk(joint_of(A[:40], T[:40]), prior, [0.0])
    torch.testing.assert_close(
        joint_of(A[40:], T[40:] + 3).error(fitted),
        mean_squared_error(A[40:], T[40:] + 3, fitted),
        rtol=1e-7,
        atol=1e-9,
    )


@given(regressions())
@settings(max_examples=40, deadline=None)
def test_a_layer_without_a_bias_is_fitted_through_the_origin(case):
    A, T, prior = case
    exact, kept = shrunk(joint_of(A, T, centred=False), prior, [0.0, INFINITY])
    expected = torch.linalg.lstsq(A, T, driver="gelsd").solution
    torch.testing.assert_close(exact.weight, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(kept.weight, prior)
    assert not exact.bias.any()
    assert not kept.bias.any()


def test_more_ridge_fits_the_rows_less():
    torch.manual_seed(0)
    A = torch.randn(50, 4, dtype=torch.float64)
    T = A @ torch.randn(4, 2, dtype=torch.float64) + torch.randn(50, 2, dtype=torch.float64)
    joint, ridges = joint_of(A, T), [0.0, 1e-2, 1.0, 100.0, INFINITY]
    found = shrunk(joint, torch.zeros(4, 2, dtype=torch.float64), ridges)
    assert [fitted.ridge for fitted in found] == ridges
    errors = [float(joint.error(fitted).sum()) for fitted in found]
    assert errors == sorted(errors)
    assert len(set(errors)) == len(errors)


def test_weighted_rows_count_by_their_weight():
    torch.manual_seed(0)
    A, w = torch.randn(60, 3, dtype=torch.float64), torch.randint(0, 4, (60,))
    T = torch.randn(60, 2, dtype=torch.float64)
    weighted = joint_of(A, T, weights=w.double())
    repeated = joint_of(A.repeat_interleave(w, 0), T.repeat_interleave(w, 0))
    prior = torch.zeros(3, 2, dtype=torch.float64)
    (left,), (right,) = shrunk(weighted, prior, [0.1]), shrunk(repeated, prior, [0.1])
    torch.testing.assert_close(left.weight, right.weight, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weighted.error(left), repeated.error(right), rtol=1e-10, atol=1e-12)


def test_a_constant_input_keeps_its_prior_weight_and_does_no_harm():
    torch.manual_seed(0)
    A = torch.randn(50, 3, dtype=torch.float64)
    A[:, 1] = 7.0
    T = A @ torch.tensor([[1.0], [5.0], [-2.0]], dtype=torch.float64)
    prior = torch.full((3, 1), 0.25, dtype=torch.float64)
    (fitted,) = shrunk(joint_of(A, T), prior, [0.0])
    assert fitted.weight[1] == 0.25
    torch.testing.assert_close(A @ fitted.weight + fitted.bias, T, rtol=1e-10, atol=1e-10)


def test_without_a_bias_a_constant_input_takes_its_place():
    torch.manual_seed(0)
    A = torch.randn(50, 2, dtype=torch.float64)
    A[:, 1] = 2.0
    (fitted,) = shrunk(joint_of(A, A[:, :1] + 6, centred=False), torch.zeros(2, 1, dtype=torch.float64), [0.0])
    torch.testing.assert_close(fitted.weight, torch.tensor([[1.0], [3.0]]).double(), rtol=1e-10, atol=1e-10)


def test_with_constants_alone_there_is_nothing_to_solve():
    A, T = torch.ones(20, 2, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    prior = torch.ones(2, 1, dtype=torch.float64)
    (fitted,) = shrunk(joint_of(A, T), prior, [0.0])
    assert torch.equal(fitted.weight, prior)
    torch.testing.assert_close(fitted.bias, T.mean(0) - 2, rtol=1e-10, atol=1e-10)


def test_the_prior_is_not_written_into():
    A, T = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    prior = torch.ones(2, 1, dtype=torch.float64)
    shrunk(joint_of(A, T), prior, [0.0, INFINITY])
    assert torch.equal(prior, torch.ones(2, 1, dtype=torch.float64))


def test_the_variance_is_that_of_the_targets():
    torch.manual_seed(0)
    A, T = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64) + 4
    torch.testing.assert_close(joint_of(A, T).variance(), T.var(dim=0, correction=0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(joint_of(A, T, False).variance(), T.square().mean(0), rtol=1e-10, atol=1e-12)


def test_the_error_is_never_negative():
    """An exact fit of large values: what is left is rounding."""
    torch.manual_seed(0)
    A = 1e6 * torch.randn(50, 3, dtype=torch.float64)
    T = A @ torch.randn(3, 4, dtype=torch.float64)
    joint = joint_of(A, T)
    (fitted,) = shrunk(joint, torch.zeros(3, 4, dtype=torch.float64), [0.0])
    assert bool((joint.error(fitted) >= 0).all())
    silent = Fitted(torch.zeros(3, 4, dtype=torch.float64), T.mean(0), 0.0, 0.0, 1.0)
    torch.testing.assert_close(joint.error(silent), joint.variance(), rtol=1e-10, atol=0.0)


def test_a_singular_system_is_refused_by_name_and_solved_with_a_ridge():
    torch.manual_seed(0)
    A = torch.randn(40, 2, dtype=torch.float64)
    A, T = torch.cat([A, A[:, :1]], dim=1), A[:, :1] * 4
    prior = torch.zeros(3, 1, dtype=torch.float64)
    with pytest.raises(IllConditionedError, match=r"conv7: the covariance of its 3 kept inputs is singular"):
        shrunk(joint_of(A, T), prior, [0.0], "conv7")
    (fitted,) = shrunk(joint_of(A, T), prior, [1e-8])
    torch.testing.assert_close(fitted.weight, torch.tensor([[2.0], [0.0], [2.0]]).double(), rtol=1e-6, atol=1e-6)
