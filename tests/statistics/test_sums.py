"""A weight for each output: moments, selection and refits against weighted least squares by hand."""

import itertools

import pytest
import torch
from torch import nn

import recoup
from recoup.algebra.moments import SHUT
from recoup.statistics import sums
from recoup.statistics.rank import problem_of
from tests.oracles import records_of, weighted_least_squares, weighted_moments
from tests.test_laws import calibration

WEIGHTINGS = ("none", "slope", "outputs")
OUTPUTS = recoup.Paper(weighting="outputs", ridge=0.0, positions=None)


def perceptron(inputs=6, width=5, outputs=4, act=nn.Sigmoid, seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs), act(), nn.Linear(outputs, 3)
    model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        model[2].bias.copy_(torch.linspace(-3, 2, outputs))
    return model


def rows(count=300, inputs=6, seed=1):
    mixing = torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(seed))
    return (torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed + 1)) @ mixing).double()


def seen_of(model, x, method=OUTPUTS):
    return calibration(recoup.trace(model, x), [x[:120], x[120:]], method)


def slopes_of(model, x, layer="2"):
    """Inputs of a layer, its outputs, and g'(y)² of every output; no row counts for nothing."""
    a, y = records_of(model, layer, x)
    return a, y, (y.sigmoid() * (1 - y.sigmoid())).square() + SHUT


def test_every_output_has_the_moments_of_its_own_weights():
    model, x = perceptron(), rows()
    seen = seen_of(model, x).statistics["2"]
    a, _, s = slopes_of(model, x)
    assert [pattern.outputs.tolist() for pattern in seen.patterns] == [[0], [1], [2], [3]]
    for n, pattern in enumerate(seen.patterns):
        mean, covariance = weighted_moments(a, s[:, n])
        torch.testing.assert_close(pattern.mean, mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pattern.moments.covariance, covariance, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pattern.slopes, s[:, n].mean()[None], rtol=1e-10, atol=0)


def test_all_patterns_together_are_the_moments_of_the_mean_slope():
    model, x = perceptron(outputs=20), rows()
    many, one = (seen_of(model, x, recoup.Paper(weighting=w)).statistics["2"] for w in ("outputs", "slope"))
    assert len(many.patterns) == sums.PATTERNS
    torch.testing.assert_close(many.moments.covariance, one.moments.covariance, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(many.mean, one.mean, rtol=1e-10, atol=1e-13)
    assert many.moments.effective == pytest.approx(one.moments.effective)
    assert many.moments.rows == one.moments.rows == 300


def test_outputs_of_a_pattern_share_the_mean_of_their_slopes(monkeypatch):
    monkeypatch.setattr(sums, "PATTERNS", 2)
    model, x = perceptron(), rows()
    with torch.no_grad():  # two that go together, whatever their size
        model[2].weight[1], model[2].bias[1] = model[2].weight[0], model[2].bias[0]
        model[2].weight[3], model[2].bias[3] = model[2].weight[2], model[2].bias[2]
    a, _, s = slopes_of(model, x)
    patterns = seen_of(model, x).statistics["2"].patterns
    assert sorted(pattern.outputs.tolist() for pattern in patterns) == [[0, 1], [2, 3]]
    for pattern in patterns:
        _, covariance = weighted_moments(a, s[:, pattern.outputs].mean(1))
        torch.testing.assert_close(pattern.moments.covariance, covariance, rtol=1e-10, atol=1e-12)


def test_each_output_is_refitted_by_weighted_least_squares():
    model, x = perceptron(), rows()
    seen = seen_of(model, x)
    keep = torch.tensor([True, False, True, True, False])
    smaller = recoup.apply(model, recoup.recover(seen, {"0": keep}).plan)
    a, y, s = slopes_of(model, x)
    for n in range(4):
        weight, bias = weighted_least_squares(a[:, keep], y[:, n], s[:, n])
        torch.testing.assert_close(smaller[2].weight[n], weight, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(smaller[2].bias[n], bias, rtol=1e-7, atol=1e-9)


def test_a_convolution_and_a_transposed_one_are_refitted_by_weighted_least_squares():
    for make in (nn.Conv2d, nn.ConvTranspose2d):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), make(4, 3, 1), nn.Sigmoid(), nn.Conv2d(3, 2, 1))
        model, x = model.double().eval(), torch.randn(30, 2, 4, 4).double()
        seen = calibration(recoup.trace(model, x), [x], OUTPUTS)
        keep = torch.tensor([True, True, False, True])
        smaller = recoup.apply(model, recoup.recover(seen, {"0": keep}).plan)
        a, y = (value.movedim(1, -1).flatten(0, -2) for value in records_of(model, "2", x))
        s = (y.sigmoid() * (1 - y.sigmoid())).square()
        got = smaller[2].weight.flatten(1) if make is nn.Conv2d else smaller[2].weight.flatten(1).T
        for n in range(3):
            weight, bias = weighted_least_squares(a[:, keep], y[:, n], s[:, n])
            torch.testing.assert_close(got[n], weight, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(smaller[2].bias[n], bias, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_greedy_in_the_weighted_error_by_hand(seed):
    """E|g'(y)(y - ŷ)|² of every set, each output fitted on its own: no algebra of ours."""
    model, x = perceptron(width=4, outputs=3, seed=seed), rows(seed=seed)
    seen = seen_of(model, x)
    a, y, s = slopes_of(model, x)

    def error(kept):
        total = 0.0
        for n in range(3):
            weight, bias = weighted_least_squares(a[:, kept], y[:, n], s[:, n])
            total += float((s[:, n] * (y[:, n] - a[:, kept] @ weight - bias).square()).sum())
        return total

    kept = []
    for _ in range(4):
        kept.append(min((j for j in range(4) if j not in kept), key=lambda j: error([*kept, j])))
    ranking = recoup.rank(seen)["0"]
    assert ranking.order.tolist() == kept
    for n in range(1, 5):
        assert float(ranking.loss[n]) == pytest.approx(error(kept[:n]) / error([]), rel=1e-6, abs=1e-9)


def two_channels():
    """The second channel makes by far the larger output, behind an activation that never opens."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        model[2].bias.copy_(torch.tensor([20.0, -60.0]))
    return model, torch.randn(400, 2, generator=torch.Generator().manual_seed(0)).double()


def test_one_weight_for_all_outputs_ranks_the_wrong_channel_first_and_one_for_each_the_right_one():
    model, x = two_channels()
    orders = {w: recoup.rank(seen_of(model, x, recoup.Paper(weighting=w)))["0"].order.tolist() for w in WEIGHTINGS}
    assert orders == {"none": [1, 0], "slope": [1, 0], "outputs": [0, 1]}
    widths = {"0": 1}
    for weighting, is_right in (("slope", False), ("outputs", True)):
        result = recoup.prune(model, [x], widths=widths, method=recoup.Paper(weighting=weighting))
        with torch.no_grad():
            lost = (result.model(x) - model(x)).abs().max()
        assert (float(lost) < 1e-6) is is_right


def test_parts_of_one_layer_are_relative_to_all_of_it():
    model, x = perceptron(), rows()
    seen = seen_of(model, x)
    problem = problem_of(seen, seen.structure.group("0"))
    variances = [float((layer.weight * (layer.covariance @ layer.weight)).sum()) for layer in problem.layers]
    assert len(problem.layers) == 4
    assert [layer.scale for layer in problem.layers] == [pytest.approx(sum(variances))] * 4


def test_a_layer_without_an_activation_has_no_patterns():
    model, x = perceptron(), rows()
    assert seen_of(model, x).statistics["4"].patterns == ()


def test_rows_count_alike_for_outputs_that_were_closed_on_all_of_them():
    model, x = perceptron(act=nn.ReLU), rows()
    with torch.no_grad():
        model[2].bias[0] = -1e4
    closed = seen_of(model, x).statistics["2"].patterns[0]
    a, _ = records_of(model, "2", x)
    mean, covariance = weighted_moments(a, torch.ones(len(a)))
    assert float(closed.slopes) == pytest.approx(SHUT)
    torch.testing.assert_close(closed.mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(closed.moments.covariance, covariance, rtol=1e-10, atol=1e-12)


def test_long_flattened_maps_have_a_mean_for_every_input_and_pattern(monkeypatch):
    monkeypatch.setattr("recoup.statistics.calibrate.MOST_INPUTS", 8)
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3), nn.Sigmoid(), nn.Linear(3, 2)
    model, x = nn.Sequential(*layers).double().eval(), torch.randn(50, 1, 3, 3).double()
    seen = calibration(recoup.trace(model, x), [x], OUTPUTS).statistics["3"]
    a, y = records_of(model, "3", x)
    assert seen.share == 9
    for n, pattern in enumerate(seen.patterns):
        s = (y[:, n].sigmoid() * (1 - y[:, n].sigmoid())).square()
        torch.testing.assert_close(pattern.mean, weighted_moments(a, s)[0], rtol=1e-9, atol=1e-12)
    for left, right in itertools.pairwise(pattern.mean for pattern in seen.patterns):
        assert not torch.allclose(left, right)
