"""What one-pass recovery says of itself: what does not count is not counted, residuals are those to expect."""

import pytest
import torch
from torch import nn

import recoup

HALF = recoup.Budget(width=0.5)


def hardly_open(inputs=20, width=64, made=32):
    """A perceptron whose second activation lets about one sample in a hundred pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, made), nn.ReLU(), nn.Linear(made, 4))
    with torch.no_grad():
        reached = model[:3](torch.randn(2000, inputs)) - model[2].bias
        model[2].bias.copy_(-reached.amax(0))
    return model.double().eval()


def samples(count, seed=1):
    return torch.randn(count, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_samples_whose_activation_is_closed_do_not_count():
    model, seen = hardly_open(), samples(1000)
    with torch.no_grad():
        slopes = (model[:3](seen) > 0).double().mean(1)
    with pytest.warns(recoup.RecoupWarning, match="saw fewer samples than they have inputs"):
        result = recoup.prune(model, [seen], budget=HALF, method=recoup.Paper(classifier=True))
    layer = result.report.recovery["2"]
    assert layer.rows == int(slopes.sum() ** 2 / slopes.square().sum())
    assert layer.rows < layer.inputs == 32
    assert layer.residual is None  # next to nothing on the samples fitted to, above 1 on others
    assert "2: " in next(iter(result.report.warnings))
    assert result.report.to_json()["recovery"]["2"]["residual"] is None


def test_with_all_alike_every_sample_counts():
    method = recoup.Paper(weighting="none", classifier=True)
    result = recoup.prune(hardly_open(), [samples(2000)], budget=HALF, method=method)
    assert result.report.recovery["2"].rows == 2000
    assert result.report.recovery["2"].residual is not None


@pytest.mark.parametrize("count", [60, 1000])
def test_the_residual_is_the_error_on_samples_that_were_not_fitted_to(count):
    """For 24 of 32 Gaussian inputs; the mean over draws, which scatter."""
    said, true = [], []
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(40, 32), nn.Identity(), nn.Linear(32, 16)).double().eval()
        seen, others = (torch.randn(n, 40, dtype=torch.float64) for n in (count, 2000))
        calibration = recoup.calibrate(
            recoup.trace(model, seen), recoup.split(model, [seen], held_out=False), recoup.Paper(weighting="none")
        )
        plan = recoup.recover(calibration, {"0": torch.arange(32) < 24}).plan
        smaller = recoup.apply(model, plan)
        with torch.no_grad():
            wanted = model(others)
            true.append(float((smaller(others) - wanted).square().mean() / wanted.var(dim=0).mean()))
        said.append(plan.recovery["2"].residual)
    assert sum(said) == pytest.approx(sum(true), rel=0.1)
