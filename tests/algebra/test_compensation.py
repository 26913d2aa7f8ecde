import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.compensation import compensate, rescale_variance
from recoup.errors import IllConditionedError
from tests.oracles import least_squares, weighted_moments


@st.composite
def regressions(draw):
    torch.manual_seed(draw(st.integers(0, 9999)))
    d, n = draw(st.integers(2, 7)), draw(st.integers(1, 4))
    X = torch.randn(200, d, dtype=torch.float64) @ torch.randn(d, d, dtype=torch.float64) + 3
    keep = torch.rand(d) < 0.6
    keep[draw(st.integers(0, d - 1))] = True
    return X, torch.randn(d, n, dtype=torch.float64), keep


def covariance(X):
    return torch.cov(X.T, correction=0)


@given(regressions())
@settings(max_examples=60, deadline=None)
def test_closed_form_is_least_squares_on_the_raw_rows(case):
    X, W, keep = case
    fitted = compensate(covariance(X), W, keep, ridge=0.0)
    slope, intercept = least_squares(X[:, keep], X @ W)
    torch.testing.assert_close(fitted.weight[keep], slope, rtol=1e-6, atol=1e-8)
    assert not fitted.weight[~keep].any()
    torch.testing.assert_close(X.mean(0) @ (W - fitted.weight), intercept, rtol=1e-6, atol=1e-6)


@given(regressions(), st.sampled_from([0.0, 1e-4, 0.1]))
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


def test_ridge_is_reported_in_absolute_terms_and_a_singular_system_is_refused_without_it():
    X = torch.randn(60, 3, dtype=torch.float64)
    X[:, 1] = X[:, 0]
    W, keep = torch.ones(3, 1, dtype=torch.float64), torch.tensor([True, True, False])
    G = covariance(X)
    with pytest.raises(IllConditionedError, match=r"conv2: the covariance of its 2 kept inputs is singular"):
        compensate(G, W, keep, ridge=0.0, name="conv2")
    fitted = compensate(G, W, keep, ridge=1e-3)
    assert fitted.ridge == pytest.approx(1e-3 * float(G[:2, :2].diagonal().mean()))
    assert fitted.condition > 100


def test_rescaling_leaves_silent_outputs_alone():
    G = torch.diag(torch.tensor([1.0, 1.0], dtype=torch.float64))
    W = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    fitted = rescale_variance(G, compensate(G, W, torch.tensor([True, False]), ridge=0.0))
    assert torch.equal(fitted.weight, torch.zeros(2, 1, dtype=torch.float64))
