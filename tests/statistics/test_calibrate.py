import copy
import dataclasses
import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup.errors import CalibrationError
from recoup.operators.names import operation_name
from recoup.statistics.calibrate import most_inputs
from tests.oracles import records_of, unfolded, weighted_moments
from tests.zoo import ZOO, Entry, seeded

ALL = recoup.Paper(weighting="none", positions=None)


def seen_by(model, batches, method=ALL):
    return recoup.calibrate(recoup.trace(model, batches[0]), streamed(model, batches), method)


def streamed(model, batches):
    """All of them fitted to, as they come."""
    return recoup.split(model, batches, held_out=False)


def test_statistics_are_those_of_the_raw_patches():
    entry = ZOO["windows"]
    model, batch = entry.build(4), entry.batch(12)
    seen = seen_by(model, [batch])
    for name in ("b", "c", "d"):
        x, _ = records_of(model, name, batch)
        rows = unfolded(x, model.get_submodule(name))
        mean, covariance = weighted_moments(rows, torch.ones(len(rows)).double())
        torch.testing.assert_close(seen.statistics[name].moments.mean, mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(seen.statistics[name].moments.covariance, covariance, rtol=1e-8, atol=1e-9)


def test_slope_weights_are_those_of_batch_norm_and_activation():
    """For conv2 of the plain network g is batch norm, then ReLU: g' is the scale where the result is positive."""
    entry = ZOO["plain"]
    model, batch = entry.build(4), entry.batch(12)
    seen = seen_by(model, [batch], recoup.Paper(positions=None))
    x, y = records_of(model, "0.2.0", batch)
    norm = model[0][2][1]
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    slope = scale.view(1, -1, 1, 1) * (norm(y) > 0)
    weights = slope.square().mean(1).flatten().detach()
    mean, covariance = weighted_moments(unfolded(x, model[0][2][0]), weights)
    torch.testing.assert_close(seen.statistics["0.2.0"].moments.mean, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(seen.statistics["0.2.0"].moments.covariance, covariance, rtol=1e-8, atol=1e-9)


def test_the_chain_of_g_ends_at_an_addition_and_at_a_fork():
    entry = ZOO["residual"]
    traced = recoup.trace(entry.build(4), entry.batch(2))
    chains = {name: [operation_name(node.target) for node in g.nodes] for name, g in traced.activations.items()}
    assert chains["a.0.0"] == ["batch_norm", "relu"]
    assert chains["a.1.0"] == ["batch_norm"]
    assert chains["head"] == []


def test_batch_size_does_not_matter():
    entry = ZOO["residual"]
    model, batch = entry.build(4), entry.batch(30)
    whole = seen_by(model, [batch], recoup.Paper(positions=None))
    parts = seen_by(model, list(batch.split(7)), recoup.Paper(positions=None))
    for name, statistics in whole.statistics.items():
        torch.testing.assert_close(
            statistics.moments.scatter, parts.statistics[name].moments.scatter, rtol=1e-8, atol=1e-8
        )
    assert whole.samples == parts.samples == 30


def test_sampled_positions_estimate_the_same_covariance():
    entry = ZOO["plain"]
    model, batches = entry.build(4), [entry.batch(4, seed=i) for i in range(300)]
    every = seen_by(model, batches).statistics["0.2.0"].moments
    some = seen_by(model, batches, recoup.Paper(weighting="none", positions=4)).statistics["0.2.0"].moments
    assert some.rows == 1200 * 4
    assert every.rows == 1200 * 16
    assert float((some.covariance - every.covariance).norm() / every.covariance.norm()) < 0.1


def test_linear_layers_read_any_number_of_leading_dims():
    entry = ZOO["perceptron"]
    model, batch = entry.build(5), entry.batch(12)
    x, _ = records_of(model, "2", batch)
    rows = x.flatten(0, -2)
    _, covariance = weighted_moments(rows, torch.ones(len(rows)).double())
    torch.testing.assert_close(seen_by(model, [batch]).statistics["2"].moments.covariance, covariance)


def test_a_layer_that_runs_twice_is_counted_twice():
    entry = ZOO["shared"]
    seen = seen_by(entry.build(4), [entry.batch(5)])
    assert seen.statistics["again"].moments.rows == 2 * 5 * 64
    assert seen.statistics["head"].moments.rows == 5 * 64


def test_a_long_flattened_map_shares_one_covariance_between_its_positions(monkeypatch):
    entry = ZOO["flattened"]
    model, batch = entry.build(6), entry.batch(50)
    full = seen_by(model, [batch]).statistics["4"]
    monkeypatch.setattr(importlib.import_module("recoup.statistics.calibrate"), "MOST_INPUTS", 20)
    seen = seen_by(model, [batch])
    shared = seen.statistics["4"]
    assert (shared.share, len(shared.channel_of)) == (9, 6)
    torch.testing.assert_close(shared.mean, full.mean)
    x, _ = records_of(model, "4", batch)
    rows = x.view(50, 6, 9).transpose(1, 2).flatten(0, 1)
    _, covariance = weighted_moments(rows, torch.ones(len(rows)).double())
    torch.testing.assert_close(shared.moments.covariance, covariance)
    weight = model[4].weight
    assert torch.equal(shared.as_weight(shared.as_features(weight), weight), weight)
    plan = recoup.recover(seen, {"0": torch.tensor([True, True, True, True, True, False])}).plan
    smaller = recoup.apply(model, plan)
    with torch.no_grad():
        error = (smaller(batch) - model(batch)).square().mean() / model(batch).var()
        cut = (batch_without(model, 5)(batch) - model(batch)).square().mean() / model(batch).var()
        torch.testing.assert_close(smaller(batch).mean(0), model(batch).mean(0))
    assert float(error) < float(cut)


def test_the_taps_of_a_long_kernel_share_one_covariance_of_the_channels():
    with seeded(3):
        model = nn.Sequential(nn.Conv1d(2, 33, 3), nn.ReLU(), nn.Conv1d(33, 5, 64, padding=31)).eval()
        batch = torch.randn(6, 2, 90)
    assert most_inputs(64) < 33 * 64 and most_inputs(9) >= 33 * 64
    shared = seen_by(model, [batch]).statistics["2"]
    assert (shared.share, len(shared.channel_of)) == (64, 33)
    x, _ = records_of(model, "2", batch)
    taps = F.pad(x, (31, 31)).unfold(2, 64, 1)  # (samples, channels, positions, taps)
    mean, covariance = weighted_moments(taps.movedim(1, -1).flatten(0, 2), torch.ones(taps[:, 0].numel()).double())
    torch.testing.assert_close(shared.mean, taps.double().mean((0, 2)).flatten())
    torch.testing.assert_close(shared.moments.mean, mean)
    torch.testing.assert_close(shared.moments.covariance, covariance)


@pytest.mark.parametrize("method", ["best", "fast", "paper"])
def test_copies_behind_a_long_kernel_lose_nothing(method):
    with seeded(4):
        model = nn.Sequential(
            nn.Conv1d(2, 72, 3), nn.ReLU(), nn.Conv1d(72, 8, 64), nn.ReLU(), nn.Flatten(), nn.Linear(56, 3)
        ).eval()
        model[0].weight.data[36:], model[0].bias.data[36:] = model[0].weight.data[:36], model[0].bias.data[:36]
        images, fresh = torch.randn(60, 2, 72), torch.randn(50, 2, 72)
    result = recoup.prune(model, list(images.split(20)), budget=recoup.Budget(width=0.5), exclude=["2"], method=method)
    assert result.model[0].out_channels == 36
    with torch.no_grad():
        torch.testing.assert_close(result.model(fresh), model(fresh), rtol=1e-4, atol=1e-4)


def batch_without(model, channel):
    """The model with one channel of its first layer cut off and nothing done about it."""
    cut = copy.deepcopy(model)
    cut[4].weight.data.view(4, 6, 9)[:, channel] = 0
    return cut


def test_half_precision_models_are_calibrated():
    model = Entry(ZOO["plain"].factory, ZOO["plain"].shapes).build(4).to(torch.bfloat16)
    result = recoup.prune(model, [ZOO["plain"].batch(40).to(torch.bfloat16)], budget=recoup.Budget(width=0.5))
    assert next(result.model.parameters()).dtype == torch.bfloat16


def test_batches_of_every_form():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 4)

        def forward(self, left, right):
            return self.c(F.relu(self.a(left) + self.b(right)))

    model, left, right, y = Two().eval(), torch.randn(30, 3), torch.randn(30, 2), torch.arange(30) % 4
    forms = [(left, right), {"left": left, "right": right}, ((left, right), y), ({"left": left, "right": right}, y)]
    results = [recoup.prune(model, [form], budget=recoup.Budget(width=0.5)).model.c.weight for form in forms]
    assert all(torch.equal(results[0], other) for other in results[1:])
    single = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    forms = [left, (left, y), [left, y], [left]]
    results = [recoup.prune(single, [form], budget=recoup.Budget(width=0.5)).model[2].weight for form in forms]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_data_loader_is_read_once():
    reads = []

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            reads.append(index)
            return torch.randn(3), index % 4

    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    told = []
    loader = torch.utils.data.DataLoader(Images(), batch_size=6)
    method = recoup.Paper(classifier=True)
    recoup.prune(
        model, loader, budget=recoup.Budget(width=0.5), method=method, progress=lambda *step: told.append(step)
    )
    assert reads == list(range(24))
    assert [step for step in told if step[0] == "calibrate"] == [("calibrate", i, 4) for i in (1, 2, 3, 4)]


def test_a_layer_that_never_runs_is_named():
    class Sleeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.awake, (self.a, self.b, self.c) = True, (nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))

        def forward(self, x):
            return self.c(self.b(self.a(x)) if self.awake else self.a(x))

    model, x = Sleeper().eval(), torch.randn(9, 3)
    traced = recoup.trace(model, x)
    traced.host.awake = False
    with pytest.raises(CalibrationError, match="b was captured for one sample but never ran during calibration"):
        recoup.calibrate(traced, streamed(model, [x]), recoup.Paper())


class Sloped(recoup.Fast):
    """Held-out images, and positions that count by the slope of the activation."""

    weighting = "slope"


@pytest.mark.parametrize(("bias", "has_prior"), [(3.0, False), (-2.2, True)], ids=["open", "hardly open"])
def test_a_prior_is_for_layers_that_saw_few_rows_that_count(bias, has_prior):
    """240 rows for 36 inputs are enough, unless the activation behind the layer is closed for nearly all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4))
    model = model.double().eval()
    images = torch.randn(300, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        reached = model[:4](images) - model[3].bias
        model[3].bias.copy_(-reached.mean(0) + bias * reached.std(0))
    data = recoup.split(model, [images])
    seen = recoup.calibrate(recoup.trace(model, images), data, Sloped()).statistics["3"].moments
    plain = recoup.calibrate(recoup.trace(model, images), dataclasses.replace(data, held=()), Sloped())
    raw = plain.statistics["3"].moments
    assert raw.rows == 240
    assert (raw.effective < 2 * 36) == has_prior
    assert torch.equal(seen.scatter, raw.scatter) != has_prior
