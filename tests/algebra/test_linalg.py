import itertools

import pytest
import torch

from recoup.algebra.linalg import add_ridge, factorise, independent_rows, live_rows, narrow_factor
from recoup.errors import IllConditionedError


def spd(condition, d=6):
    """A symmetric positive definite matrix of known condition number."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q
    return basis * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), d, dtype=torch.float64) @ basis.T


def test_solve_and_inverse():
    S = spd(1e3)
    factor, right = factorise(S), torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(S @ factor.solve(right), right)
    torch.testing.assert_close(S @ factor.inverse(), torch.eye(6, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8])
def test_condition_is_a_lower_bound_of_the_right_order(condition):
    found = factorise(spd(condition)).condition
    assert found <= condition * 1.001
    assert found >= condition**0.3


def test_a_singular_or_broken_matrix_is_refused_by_name():
    for matrix in (torch.ones(3, 3), -torch.eye(2), torch.full((2, 2), torch.nan)):
        with pytest.raises(IllConditionedError, match="layer4.conv1: .*Raise `ridge`"):
            factorise(matrix.double(), "layer4.conv1")


def test_nothing_to_factorise_is_fine():
    assert factorise(torch.zeros(0, 0, dtype=torch.float64)).condition == 1.0
    assert add_ridge(torch.zeros(0, 0, dtype=torch.float64), 1.0)[1] == 0.0


def test_ridge_is_relative_to_the_mean_diagonal():
    ridged, amount = add_ridge(torch.diag(torch.tensor([1.0, 3.0])).double(), 0.1)
    assert amount == pytest.approx(0.2)
    torch.testing.assert_close(ridged.diagonal(), torch.tensor([1.2, 3.2], dtype=torch.float64))


def test_live_rows_are_those_that_vary():
    assert live_rows(torch.diag(torch.tensor([0.0, 1e-20, 1e-3, 1.0])).double()).tolist() == [False, False, True, True]
    assert live_rows(torch.zeros(2, 2).double()).tolist() == [False, False]


def test_a_narrow_factor_has_the_same_product():
    wide = torch.randn(4, 20, dtype=torch.float64)
    narrow = narrow_factor(wide)
    assert narrow.shape == (4, 4)
    torch.testing.assert_close(narrow @ narrow.T, wide @ wide.T)
    slim = torch.randn(4, 2, dtype=torch.float64)
    assert narrow_factor(slim) is slim


def test_rows_that_are_combinations_of_those_before_them_are_found():
    """Against the rank of every leading part of the data."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(50, 9, dtype=torch.float64, generator=generator)
    X[:, 3], X[:, 5] = X[:, 1], X[:, 0] - 2 * X[:, 2] + 0.5 * X[:, 4]
    X[:, 8] = X[:, 3] + X[:, 7]
    centred = X - X.mean(0)
    ranks = [int(torch.linalg.matrix_rank(centred[:, :n])) for n in range(10)]
    expected = [after > before for before, after in itertools.pairwise(ranks)]
    assert independent_rows(centred.T @ centred / 50).tolist() == expected
    assert expected == [True, True, True, False, True, False, True, True, False]


def test_fewer_samples_than_rows_leave_as_many_independent_ones_as_there_were():
    X = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centred = X - X.mean(0)
    assert independent_rows(centred.T @ centred).tolist() == [True] * 4 + [False] * 8
    assert bool(independent_rows(torch.eye(3).double()).all())
