import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.moments import Accumulator
from recoup.algebra.ridge import Fitted, Joint, compensate, moved, on_new_rows, rescale_variance
from recoup.errors import IllConditionedError
from tests.oracles import least_squares, weighted_moments

INFINITY = math.inf


@st.composite
def compensations(draw):
    """Rows of inputs far from zero, a weight on them, and which of them are kept."""
    torch.manual_seed(draw(st.integers(0, 9999)))
    d, n = draw(st.integers(2, 7)), draw(st.integers(1, 4))
    X = torch.randn(200, d, dtype=torch.float64) @ torch.randn(d, d, dtype=torch.float64) + 3
    keep = torch.rand(d) < 0.6
    keep[draw(st.integers(0, d - 1))] = True
    return X, torch.randn(d, n, dtype=torch.float64), keep


def covariance(X):
    return torch.cov(X.T, correction=0)


@given(compensations())
@settings(max_examples=60, deadline=None)
def test_closed_form_is_least_squares_on_the_raw_rows(case):
    X, W, keep = case
    fitted = compensate(covariance(X), W, keep, ridge=0.0)
    slope, intercept = least_squares(X[:, keep], X @ W)
    torch.testing.assert_close(fitted.weight[keep], slope, rtol=1e-6, atol=1e-8)
    assert not fitted.weight[~keep].any()
    torch.testing.assert_close(X.mean(0) @ (W - fitted.weight), intercept, rtol=1e-6, atol=1e-6)


@given(compensations(), st.sampled_from([0.0, 1e-4, 0.1]))
@settings(max_examples=60, deadline=None)
def test_predicted_residual_is_the_measured_one(case, ridge):
    X, W, keep = case
    fitted = compensate(covariance(X), W, keep, ridge=ridge)
    error = X @ (W - fitted.weight)
    torch.testing.assert_close(fitted.residual, error.var(dim=0, correction=0), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(fitted.variance, (X @ W).var(dim=0, correction=0), rtol=1e-8, atol=1e-9)
    rescaled = rescale_variance(covariance(X), fitted)
    error = X @ (W - rescaled.weight)
    torch.testing.assert_close(rescaled.residual, error.var(dim=0, correction=0), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close((X @ rescaled.weight).var(dim=0, correction=0), fitted.variance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [40, 12.5, 10])
def test_a_fit_to_few_rows_is_known_to_do_worse_on_others(rows):
    """Seven inputs and a mean take eight of the rows."""
    assert on_new_rows(0.1, rows, 7) == pytest.approx(0.1 * rows / (rows - 8) * (rows - 1) / (rows - 9))


@pytest.mark.parametrize("rows", [0, 3, 7, 9])
def test_a_fit_to_no_more_rows_than_inputs_tells_nothing_of_others(rows):
    assert on_new_rows(4e-16, rows, 7) is None


def test_keeping_everything_changes_nothing_at_any_ridge():
    W = torch.randn(5, 3, dtype=torch.float64)
    fitted = compensate(torch.eye(5, dtype=torch.float64), W, torch.ones(5, dtype=torch.bool), ridge=10.0)
    assert torch.equal(fitted.weight, W)
    assert fitted.relative_residual == 0


def test_rows_that_depend_on_kept_ones_lose_nothing():
    torch.manual_seed(0)
    X = torch.randn(300, 6, dtype=torch.float64)
    X[:, 4] = 2 * X[:, 0] - X[:, 3] + 5
    X[:, 5] = -1.0
    W = torch.randn(6, 4, dtype=torch.float64)
    keep = torch.tensor([True, True, True, True, False, False])
    fitted = compensate(covariance(X), W, keep, ridge=0.0)
    assert fitted.relative_residual < 1e-12
    y = X @ fitted.weight + X.mean(0) @ (W - fitted.weight)
    torch.testing.assert_close(y, X @ W, rtol=1e-8, atol=1e-8)


def test_weighted_compensation_solves_the_weighted_problem():
    torch.manual_seed(0)
    X, w = torch.randn(100, 4, dtype=torch.float64), torch.rand(100, dtype=torch.float64)
    W, keep = torch.randn(4, 2, dtype=torch.float64), torch.tensor([True, True, False, True])
    _, G = weighted_moments(X, w)
    fitted = compensate(G, W, keep, ridge=0.0)
    root = w.sqrt()[:, None]
    design = torch.cat([X[:, keep], torch.ones(100, 1, dtype=torch.float64)], dim=1) * root
    expected = torch.linalg.lstsq(design, (X @ W) * root).solution
    torch.testing.assert_close(fitted.weight[keep], expected[:-1], rtol=1e-8, atol=1e-8)


def test_a_constant_input_that_is_kept_keeps_its_weight():
    X = torch.randn(50, 3, dtype=torch.float64)
    X[:, 0] = 2.0
    W = torch.ones(3, 1, dtype=torch.float64)
    fitted = compensate(covariance(X), W, torch.tensor([True, True, False]), ridge=0.0)
    assert fitted.weight[0] == 1.0


def test_only_constants_left_is_cut_without_a_system_to_solve():
    G = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    fitted = compensate(G, torch.ones(2, 1, dtype=torch.float64), torch.tensor([True, False]), ridge=0.0)
    assert fitted.relative_residual == 1.0
    silent = compensate(torch.zeros(2, 2).double(), torch.ones(2, 1).double(), torch.tensor([True, False]), ridge=0.0)
    assert silent.relative_residual == 0.0


def test_ridge_is_reported_in_absolute_terms_and_without_it_dependent_rows_are_left_out():
    X = torch.randn(60, 3, dtype=torch.float64)
    X[:, 1] = X[:, 0]
    W, keep = torch.ones(3, 1, dtype=torch.float64), torch.tensor([True, True, False])
    G = covariance(X)
    without = compensate(G, W, keep, ridge=0.0, name="conv2")
    wanted, _ = least_squares(X[:, :1], X @ W)
    torch.testing.assert_close(without.weight[:1], wanted)
    assert without.weight[1:].tolist() == [[0.0], [0.0]]
    fitted = compensate(G, W, keep, ridge=1e-3)
    assert bool((fitted.weight[:2] != 0).all())
    assert fitted.ridge == pytest.approx(1e-3 * float(G[:2, :2].diagonal().mean()))
    assert fitted.condition > 100


def test_rescaling_leaves_silent_outputs_alone():
    G = torch.diag(torch.tensor([1.0, 1.0], dtype=torch.float64))
    W = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    fitted = rescale_variance(G, compensate(G, W, torch.tensor([True, False]), ridge=0.0))
    assert torch.equal(fitted.weight, torch.zeros(2, 1, dtype=torch.float64))


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
    (fitted,) = joint_of(A, T).fits(prior, [0.0])
    slope, intercept = least_squares(A, T)
    torch.testing.assert_close(fitted.weight, slope, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(fitted.bias, intercept, rtol=1e-6, atol=1e-6)
    assert (fitted.ridge, fitted.amount) == (0.0, 0.0)
    assert fitted.condition >= 1


@given(regressions())
@settings(max_examples=60, deadline=None)
def test_an_infinite_ridge_is_the_prior_with_the_bias_that_fits(case):
    A, T, prior = case
    (fitted,) = joint_of(A, T).fits(prior, [INFINITY])
    assert torch.equal(fitted.weight, prior)
    torch.testing.assert_close(fitted.bias, (T - A @ prior).mean(0), rtol=1e-10, atol=1e-10)
    assert fitted.ridge == INFINITY


@given(regressions(), st.sampled_from([1e-3, 0.1, 10.0]))
@settings(max_examples=60, deadline=None)
def test_a_ridge_minimises_the_error_plus_the_distance_from_the_prior(case, ridge):
    A, T, prior = case
    (fitted,) = joint_of(A, T).fits(prior, [ridge])
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
    (fitted,) = joint.fits(prior, [ridge])
    torch.testing.assert_close(joint.errors([fitted])[0], mean_squared_error(A, T, fitted), rtol=1e-7, atol=1e-9)


@given(regressions())
@settings(max_examples=40, deadline=None)
def test_the_error_on_other_rows_counts_what_the_bias_misses_there(case):
    A, T, prior = case
    (fitted,) = joint_of(A[:40], T[:40]).fits(prior, [0.0])
    torch.testing.assert_close(
        joint_of(A[40:], T[40:] + 3).errors([fitted])[0],
        mean_squared_error(A[40:], T[40:] + 3, fitted),
        rtol=1e-7,
        atol=1e-9,
    )


@given(regressions())
@settings(max_examples=40, deadline=None)
def test_a_layer_without_a_bias_is_fitted_through_the_origin(case):
    A, T, prior = case
    exact, kept = joint_of(A, T, centred=False).fits(prior, [0.0, INFINITY])
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
    found = joint.fits(torch.zeros(4, 2, dtype=torch.float64), ridges)
    assert [fitted.ridge for fitted in found] == ridges
    errors = joint.errors(found).sum(dim=1).tolist()
    assert errors == sorted(errors)
    assert len(set(errors)) == len(errors)


def test_weighted_rows_count_by_their_weight():
    torch.manual_seed(0)
    A, w = torch.randn(60, 3, dtype=torch.float64), torch.randint(0, 4, (60,))
    T = torch.randn(60, 2, dtype=torch.float64)
    weighted = joint_of(A, T, weights=w.double())
    repeated = joint_of(A.repeat_interleave(w, 0), T.repeat_interleave(w, 0))
    prior = torch.zeros(3, 2, dtype=torch.float64)
    (left,), (right,) = weighted.fits(prior, [0.1]), repeated.fits(prior, [0.1])
    torch.testing.assert_close(left.weight, right.weight, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weighted.errors([left]), repeated.errors([right]), rtol=1e-10, atol=1e-12)


def test_a_constant_input_keeps_its_prior_weight_and_causes_no_error():
    torch.manual_seed(0)
    A = torch.randn(50, 3, dtype=torch.float64)
    A[:, 1] = 7.0
    T = A @ torch.tensor([[1.0], [5.0], [-2.0]], dtype=torch.float64)
    prior = torch.full((3, 1), 0.25, dtype=torch.float64)
    (fitted,) = joint_of(A, T).fits(prior, [0.0])
    assert fitted.weight[1] == 0.25
    torch.testing.assert_close(A @ fitted.weight + fitted.bias, T, rtol=1e-10, atol=1e-10)


def test_without_a_bias_a_constant_input_takes_its_place():
    torch.manual_seed(0)
    A = torch.randn(50, 2, dtype=torch.float64)
    A[:, 1] = 2.0
    (fitted,) = joint_of(A, A[:, :1] + 6, centred=False).fits(torch.zeros(2, 1, dtype=torch.float64), [0.0])
    torch.testing.assert_close(fitted.weight, torch.tensor([[1.0], [3.0]]).double(), rtol=1e-10, atol=1e-10)


def test_with_constants_alone_there_is_nothing_to_solve():
    A, T = torch.ones(20, 2, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    prior = torch.ones(2, 1, dtype=torch.float64)
    (fitted,) = joint_of(A, T).fits(prior, [0.0])
    assert torch.equal(fitted.weight, prior)
    torch.testing.assert_close(fitted.bias, T.mean(0) - 2, rtol=1e-10, atol=1e-10)


def test_the_prior_is_not_written_into():
    A, T = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    prior = torch.ones(2, 1, dtype=torch.float64)
    joint_of(A, T).fits(prior, [0.0, INFINITY])
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
    (fitted,) = joint.fits(torch.zeros(3, 4, dtype=torch.float64), [0.0])
    assert bool((joint.errors([fitted])[0] >= 0).all())
    silent = Fitted(torch.zeros(3, 4, dtype=torch.float64), T.mean(0), 0.0, 0.0, 1.0)
    torch.testing.assert_close(joint.errors([silent])[0], joint.variance(), rtol=1e-10, atol=0.0)


def test_a_singular_system_is_refused_by_name_and_solved_with_a_ridge():
    torch.manual_seed(0)
    A = torch.randn(40, 2, dtype=torch.float64)
    A, T = torch.cat([A, A[:, :1]], dim=1), A[:, :1] * 4
    prior = torch.zeros(3, 1, dtype=torch.float64)
    with pytest.raises(IllConditionedError, match=r"conv7: the covariance of its 3 kept inputs is singular"):
        joint_of(A, T).fits(prior, [0.0], "conv7")
    (fitted,) = joint_of(A, T).fits(prior, [1e-8])
    torch.testing.assert_close(fitted.weight, torch.tensor([[2.0], [0.0], [2.0]]).double(), rtol=1e-6, atol=1e-6)


def test_a_bias_moves_by_more_than_rounding_of_the_sums_it_is_left_over_from():
    before, terms = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 100.0, 0.0], dtype=torch.float64)
    after = torch.tensor([1e-6, 1e-6, 1e-30], dtype=torch.float64)
    assert moved(before, after, terms, torch.float32).tolist() == [1e-6, 0.0, 1e-30]
    assert moved(before + 2, after + 2, terms, torch.float32).tolist() == [2 + 1e-6, 2.0, 2.0]
    assert torch.equal(moved(before, after, terms, torch.float64), after)
