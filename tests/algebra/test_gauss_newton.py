import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.gauss_newton import DAMPING, Linearised, _iterates, gauss_newton, total
from tests.algebra.smooth import Smooth


def linear(A, target):
    return Smooth(lambda parameters: A @ parameters[0] - target)


def linear_problem(seed, scale=1.0):
    torch.manual_seed(seed)
    A, target = torch.randn(30, 5, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    return scale * A, scale * target


def two_layers(activation, seed=0):
    """Residuals of a small network with other weights than the one its targets come from; in two pieces."""
    torch.manual_seed(seed)
    x = torch.randn(80, 3, dtype=torch.float64)
    first, second = torch.randn(3, 6, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    target = activation(x @ first) @ second

    def piece(rows):
        return Smooth(lambda parameters: activation(x[rows] @ parameters[0]) @ parameters[1] - target[rows])

    start = first + 0.3 * torch.randn(3, 6).double(), second + 0.3 * torch.randn(6, 2).double()
    return [piece(slice(0, 30)), piece(slice(30, 80))], start


def solved(pieces, start, iterations):
    """A step that is judged by the pieces it is fitted to."""
    return gauss_newton(pieces, pieces, start, iterations)


def repeated(pieces, start, steps, iterations=8):
    losses, found = [total(pieces, start)], start
    for _ in range(steps):
        found, after, before = solved(pieces, found, iterations)
        assert before == pytest.approx(losses[-1])
        losses.append(after)
    return found, losses


@pytest.mark.parametrize("seed", range(5))
def test_a_linear_problem_takes_one_damped_least_squares_step(seed):
    A, target = linear_problem(seed)
    start = torch.randn(5, 2, dtype=torch.float64)
    (found,), after, before = solved([linear(A, target)], (start,), iterations=30)
    gradient = A.T @ (A @ start - target)
    damping = DAMPING * (A @ gradient).square().sum() / gradient.square().sum()
    expected = start - torch.linalg.solve(A.T @ A + damping * torch.eye(5).double(), gradient)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert before == pytest.approx(float((A @ start - target).square().sum()))
    assert after == pytest.approx(float((A @ found - target).square().sum()))


@pytest.mark.parametrize("seed", range(5))
def test_a_linear_problem_ends_at_least_squares(seed):
    A, target = linear_problem(seed)
    (found,), _ = repeated([linear(A, target)], (torch.zeros(5, 2).double(),), steps=4, iterations=30)
    torch.testing.assert_close(found, torch.linalg.lstsq(A, target).solution, rtol=1e-6, atol=1e-7)


def test_pieces_together_are_the_whole():
    A, target = linear_problem(0)
    start = (torch.zeros(5, 2, dtype=torch.float64),)
    (whole,), after, before = solved([linear(A, target)], start, 4)
    parts = [linear(A[rows], target[rows]) for rows in (slice(0, 7), slice(7, 19), slice(19, 30))]
    (split,), after_split, before_split = solved(parts, start, 4)
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-10)
    assert (after_split, before_split) == (pytest.approx(after), pytest.approx(before))


@pytest.mark.parametrize("activation", [torch.tanh, torch.relu], ids=["tanh", "relu"])
@pytest.mark.parametrize("seed", range(3))
def test_a_two_layer_problem_improves_much(activation, seed):
    pieces, start = two_layers(activation, seed)
    _, losses = repeated(pieces, start, steps=6, iterations=20)
    assert losses[-1] < 0.05 * losses[0]


@given(st.integers(0, 9999), st.sampled_from([torch.tanh, torch.relu, torch.sin]), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_the_loss_never_rises_and_is_what_it_says(seed, activation, iterations):
    pieces, start = two_layers(activation, seed)
    found, after, before = solved(pieces, start, iterations)
    assert before == pytest.approx(total(pieces, start))
    assert after == pytest.approx(total(pieces, found))
    assert after < before or all(torch.equal(a, b) for a, b in zip(found, start, strict=True))


def test_more_iterations_solve_a_linear_problem_better():
    A, target = linear_problem(0)
    start = (torch.zeros(5, 2, dtype=torch.float64),)
    losses = [solved([linear(A, target)], start, n)[1] for n in (1, 2, 4, 8)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_residuals_does_not_matter(scale):
    """Scaled with a power of ten, not of two: equal up to rounding."""
    pieces, start = two_layers(torch.tanh)
    found, after, before = solved(pieces, start, 8)
    scaled = [Smooth(lambda parameters, piece=piece: scale * piece(parameters)) for piece in pieces]
    again, after_scaled, before_scaled = solved(scaled, start, 8)
    for left, right in zip(found, again, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)
    assert (after_scaled, before_scaled) == (pytest.approx(scale**2 * after), pytest.approx(scale**2 * before))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_of_the_parameters_does_not_matter(scale):
    pieces, start = two_layers(torch.tanh)
    found, after, _ = solved(pieces, start, 8)
    scaled = [Smooth(lambda values, piece=piece: piece(tuple(v / scale for v in values))) for piece in pieces]
    again, after_scaled, _ = solved(scaled, tuple(scale * value for value in start), 8)
    for left, right in zip(found, again, strict=True):
        torch.testing.assert_close(left, right / scale, rtol=1e-6, atol=1e-8)
    assert after_scaled == pytest.approx(after)


def test_a_solved_problem_stays_as_it_is():
    A, _ = linear_problem(0)
    start = (torch.ones(5, 1, dtype=torch.float64),)
    found, after, before = solved([linear(A, A @ start[0])], start, 5)
    assert torch.equal(found[0], start[0])
    assert (after, before) == (0.0, 0.0)


def test_a_step_too_long_is_shortened_by_halves():
    """|x|^0.4 from 1: the full step goes to about -1.5, where the residual is larger, half of it to -0.25."""
    start = (torch.ones(1, dtype=torch.float64),)
    (found,), after, before = solved([Smooth(lambda parameters: parameters[0].abs() ** 0.4)], start, 1)
    assert float(found) == pytest.approx(1 - 1.25 / (1 + DAMPING))
    assert after < before


def test_where_no_step_helps_the_start_is_returned():
    """Everywhere but at the start the residual is larger."""
    start = (torch.ones(1, dtype=torch.float64),)

    def residual(parameters):
        jump = (parameters[0] != 1).double() * 10
        return parameters[0] + jump

    found, after, before = solved([Smooth(residual)], start, 1)
    assert found is start
    assert after == before == 1.0


def test_a_step_to_where_the_residual_is_not_a_number_is_not_taken():
    start = (torch.full((1,), 0.1, dtype=torch.float64),)
    found, after, before = solved([Smooth(lambda parameters: parameters[0].log() + 10)], start, 1)
    assert bool(found[0].isfinite().all())
    assert after <= before


def test_parameters_that_nothing_depends_on_stay():
    A, target = linear_problem(0)
    start = (torch.zeros(5, 2, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    found, after, before = solved([linear(A, target)], start, 4)
    assert torch.equal(found[1], start[1])
    assert after < before


def test_the_judges_choose_among_the_iterates():
    """Ten rows of noise in five unknowns: the full solution fits them, and the judges' rows least of all."""
    torch.manual_seed(0)
    A = torch.randn(10, 8, dtype=torch.float64) * torch.logspace(0, -1.5, 8, dtype=torch.float64)
    truth = torch.randn(8, 1, dtype=torch.float64)
    fresh = torch.randn(500, 8, dtype=torch.float64) * torch.logspace(0, -1.5, 8, dtype=torch.float64)
    noisy = A @ truth + 0.5 * torch.randn(10, 1, dtype=torch.float64)
    fitting, judging = [linear(A, noisy)], [linear(fresh, fresh @ truth)]
    start = (torch.zeros(8, 1, dtype=torch.float64),)
    iterates = list(_iterates(Linearised(fitting, start), 8))
    losses = [total(judging, step) for step in iterates]
    found, after, _ = gauss_newton(fitting, judging, start, 8)
    assert after == pytest.approx(min(losses)) == pytest.approx(total(judging, found))
    assert losses.index(min(losses)) < len(losses) - 1


def test_what_the_judges_do_not_like_is_left_alone():
    start = (torch.zeros(1, dtype=torch.float64),)
    fitting, judging = [Smooth(lambda parameters: parameters[0] - 1)], [Smooth(lambda parameters: parameters[0] + 1)]
    found, after, before = gauss_newton(fitting, judging, start, 3)
    assert found is start
    assert after == before == 1.0


def test_products_about_a_point_are_those_of_the_jacobian():
    pieces, start = two_layers(torch.tanh)
    jacobian = torch.cat(
        [
            torch.autograd.functional.jacobian(lambda *p, piece=piece: piece(p).flatten(), start)[0].flatten(1)
            for piece in pieces
        ]
    )
    problem = Linearised(pieces, start)
    direction = (torch.randn_like(start[0]), torch.zeros_like(start[1]))
    expected = jacobian.T @ (jacobian @ direction[0].flatten())
    torch.testing.assert_close(problem.curvature(direction)[0].flatten(), expected)
    residual = torch.cat([piece(start).flatten() for piece in pieces])
    torch.testing.assert_close(problem.pulled(problem.residuals)[0].flatten(), jacobian.T @ residual)


@pytest.mark.parametrize(("room", "again"), [(None, 0), (2, 0), (1, 1), (0, 2)])
def test_pieces_there_is_no_room_for_are_computed_again_and_nothing_else_changes(room, again):
    pieces, start = two_layers(torch.tanh)
    calls = [0]

    class Counted(Smooth):
        def about(self, at):
            calls[0] += 1
            return super().about(at)

    problem = Linearised([Counted(piece) for piece in pieces], start, room)
    calls[0] = 0
    found = problem.pulled(problem.residuals)
    assert calls[0] == again
    problem.curvature(start)
    assert calls[0] == 2 * again
    expected = Linearised(pieces, start)
    for left, right in zip(found, expected.pulled(expected.residuals), strict=True):
        assert torch.equal(left, right)
    steps = [gauss_newton(pieces, pieces, start, 3, room)[0] for room in (room, None)]
    assert all(torch.equal(*pair) for pair in zip(*steps, strict=True))
