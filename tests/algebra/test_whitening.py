import pytest
import torch

from recoup.algebra.gauss_newton import Linearised, _iterates
from recoup.algebra.moments import Accumulator
from recoup.algebra.whitening import Whitening, whitened_inputs, whitened_outputs
from tests.algebra.smooth import Smooth


def inputs(rows=4000, seed=0):
    """Rows whose columns vary together and by very different amounts."""
    torch.manual_seed(seed)
    mix = torch.randn(6, 6, dtype=torch.float64) * torch.logspace(0, -2, 6, dtype=torch.float64)
    return torch.randn(rows, 6, dtype=torch.float64) @ mix.T + 0.5


def moments_of(rows):
    sums = Accumulator(rows.shape[1])
    sums.update(rows)
    return sums.moments()


@pytest.mark.parametrize("has_bias", [True, False])
def test_parameters_move_the_outputs_by_their_own_size(has_bias):
    rows = inputs()
    seen = torch.cat([rows, torch.ones(len(rows), 1).double()], dim=1) if has_bias else rows
    turn = Whitening(whitened_inputs(moments_of(rows), has_bias, ridge=0.0), torch.ones(3, 1).double())
    parameters = torch.randn(3, seen.shape[1], dtype=torch.float64)
    moved = seen @ turn(parameters).T
    torch.testing.assert_close(moved.square().mean(dim=0), parameters.square().sum(dim=1))


def test_a_ridge_holds_back_directions_that_hardly_vary():
    rows = inputs()
    loose, held = (whitened_inputs(moments_of(rows), False, ridge=r).square().sum() for r in (1e-6, 0.1))
    assert held < 0.01 * loose


def test_a_linear_layer_is_solved_in_one_iteration():
    rows = inputs()
    with_one = torch.cat([rows, torch.ones(len(rows), 1).double()], dim=1)
    target = torch.randn(len(rows), 3, dtype=torch.float64) + rows[:, :3]
    best = torch.linalg.lstsq(with_one, target).solution
    least = (with_one @ best - target).square().sum()
    turn = Whitening(whitened_inputs(moments_of(rows), True, ridge=0.0), torch.ones(3, 1).double())
    start = (torch.zeros(3, 7, dtype=torch.float64),)

    def loss_after_one(change):
        def residual(parameters):
            return with_one @ change(parameters[0]).T - target

        (step,) = next(iter(_iterates(Linearised([Smooth(residual)], start), 1)))
        return float(residual((step,)).square().sum() / least)

    assert loss_after_one(turn) == pytest.approx(1, abs=1e-4)
    assert loss_after_one(lambda parameters: parameters) > 1.05


@pytest.mark.parametrize("has_bias", [True, False])
def test_inputs_that_are_always_zero_stay_as_they_are(has_bias):
    back = whitened_inputs(moments_of(torch.zeros(10, 3).double()), has_bias)
    assert torch.equal(back, torch.eye(4 if has_bias else 3).double())


def test_outputs_that_matter_more_get_smaller_steps():
    """J = diag(m) ⊗ A: the curvature along output n is m_n² times that of A."""
    torch.manual_seed(0)
    A, matters = torch.randn(300, 40, dtype=torch.float64), torch.tensor([0.1, 1.0, 10.0]).double()
    signs = torch.randint(2, (300, 3)).double() * 2 - 1
    outputs = whitened_outputs((A.T @ (signs * matters)).T)
    assert outputs.shape == (3, 1)
    assert (outputs[:, 0] * matters).std() < 0.2 * (outputs[:, 0] * matters).mean()


def test_an_output_without_any_effect_gets_a_bounded_step():
    outputs = whitened_outputs(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert bool(outputs.isfinite().all())
    assert bool(whitened_outputs(torch.zeros(2, 3)).isfinite().all())


@pytest.mark.parametrize("is_white", [True, False])
def test_relative_units_are_of_the_size_of_the_weights(is_white):
    torch.manual_seed(0)
    matrix = 0.03 * torch.randn(50, 7, dtype=torch.float64)
    back = whitened_inputs(moments_of(inputs()), True) if is_white else None
    turn = Whitening(back, torch.rand(50, 1).double() + 0.1).relative_to(matrix)
    changes = torch.stack([turn(torch.randint(2, (50, 7)).double() * 2 - 1) for _ in range(200)])
    assert float(changes.square().mean().sqrt()) == pytest.approx(float(matrix.square().mean().sqrt()), rel=0.05)
