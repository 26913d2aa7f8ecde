import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra import moments
from recoup.algebra.moments import Accumulator, merge, sensitivity
from tests.oracles import weighted_moments


def summed(rows, weights=None, parts=1):
    sums = Accumulator(rows.shape[1])
    chunks = zip(rows.chunk(parts), (weights.chunk(parts) if weights is not None else [None] * parts), strict=False)
    for part, weight in chunks:
        sums.update(part, weight)
    return sums.moments()


@given(seed=st.integers(0, 999), parts=st.integers(1, 9), offset=st.sampled_from([0.0, 1e3]), strip=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_weighted_moments_are_those_of_the_definition_however_the_rows_are_cut(seed, parts, offset, strip):
    torch.manual_seed(seed)
    rows = torch.randn(50, 5, dtype=torch.float64) + offset
    weights = torch.rand(50, dtype=torch.float64)
    mean, covariance = weighted_moments(rows, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moments.STRIP, "cpu", strip)
        found = summed(rows, weights, parts)
    torch.testing.assert_close(found.mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-9, atol=1e-9)
    assert found.rows == 50


@given(seed=st.integers(0, 999), order=st.permutations(range(4)))
@settings(max_examples=30, deadline=None)
def test_parts_merge_in_any_order(seed, order):
    torch.manual_seed(seed)
    rows = torch.randn(60, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1]) + 5
    parts = [summed(part) for part in rows.chunk(4)]
    merged = parts[order[0]]
    for i in order[1:]:
        merged = merge(merged, parts[i])
    nested = merge(merge(parts[0], parts[1]), merge(parts[2], parts[3]))
    for found in (merged, nested):
        torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.scatter, torch.cov(rows.T, correction=0) * 60, rtol=1e-10, atol=1e-10)


def test_float32_rows_far_from_zero_keep_their_covariance():
    torch.manual_seed(0)
    exact = torch.randn(4000, 3, dtype=torch.float64) + 300
    rows = exact.float()
    found = summed(rows, parts=7)
    torch.testing.assert_close(found.covariance, torch.cov(rows.double().T, correction=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean, rows.double().mean(0), rtol=1e-8, atol=1e-8)


def test_half_precision_rows_are_summed_in_more():
    rows = torch.full((5000, 1), 1.5, dtype=torch.float16)
    assert summed(rows).mean.item() == 1.5


def test_rows_of_weight_zero_change_nothing():
    sums = Accumulator(2)
    sums.update(torch.randn(5, 2), torch.zeros(5))
    assert sums.moments().total == 0
    assert torch.equal(sums.moments().covariance, torch.zeros(2, 2, dtype=torch.float64))
    sums.update(torch.ones(3, 2))
    torch.testing.assert_close(sums.moments().mean, torch.ones(2, dtype=torch.float64))


def test_moments_do_not_change_after_they_were_given_out():
    sums = Accumulator(2)
    sums.update(torch.randn(5, 2))
    before = sums.moments()
    copy = before.mean.clone(), before.scatter.clone()
    sums.update(torch.randn(5, 2))
    assert torch.equal(before.mean, copy[0])
    assert torch.equal(before.scatter, copy[1])


def test_sensitivity_is_the_mean_squared_slope():
    y = torch.tensor([[-1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(sensitivity(y, lambda v: 3 * v.relu_()), torch.tensor([4.5, 9.0], dtype=torch.float64))


def test_rows_that_are_shut_count_alike_where_none_is_open_and_not_beside_one_that_is():
    weights = sensitivity(torch.tensor([[-1.0], [-2.0]]), torch.relu)
    assert 0 < weights[0] == weights[1] < 1e-9
    sums, rows = Accumulator(1), torch.tensor([[5.0], [7.0]])
    sums.update(rows, weights)
    torch.testing.assert_close(sums.moments().mean, torch.tensor([6.0], dtype=torch.float64))
    sums.update(torch.tensor([[1.0]]), sensitivity(torch.tensor([[3.0]]), torch.relu))
    torch.testing.assert_close(sums.moments().mean, torch.tensor([1.0], dtype=torch.float64), rtol=1e-9, atol=0)


def test_sensitivity_of_a_smooth_activation_matches_finite_differences():
    torch.manual_seed(0)
    y = torch.randn(7, 3, dtype=torch.float64)
    gelu, h = torch.nn.functional.gelu, 1e-6
    slope = (gelu(y + h) - gelu(y - h)) / (2 * h)
    torch.testing.assert_close(sensitivity(y, gelu), slope.square().mean(1), rtol=1e-6, atol=1e-8)


def test_sensitivity_accepts_half_precision_and_leaves_gradients_alone():
    y = torch.randn(4, 2, dtype=torch.float16)
    with torch.no_grad():
        assert sensitivity(y, torch.relu).dtype == torch.float32
        assert not torch.is_grad_enabled()
    assert not y.requires_grad


@given(seed=st.integers(0, 999), parts=st.integers(1, 9), zeros=st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_as_many_rows_count_as_their_weights_say(seed, parts, zeros):
    torch.manual_seed(seed)
    rows, weights = torch.randn(50, 3), torch.rand(50).double()
    weights[:zeros] = 0.0
    found = summed(rows, weights, parts)
    expected = float(weights.sum() ** 2 / weights.square().sum()) if zeros < 50 else 0.0
    assert abs(found.effective - expected) < 1e-9
    assert abs(merge(found, summed(rows)).squares - float(weights.square().sum()) - 50) < 1e-9
    assert found.rows == 50 and found.effective <= 50 - zeros + 1e-9


def test_rows_without_weights_all_count():
    assert summed(torch.randn(37, 2), parts=5).effective == 37
