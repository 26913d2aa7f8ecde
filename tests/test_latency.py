"""Budgets of time through `recoup.prune`, on a machine whose seconds are a known function of the work."""

import functools
import json
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup import Budget
from recoup.allocation import timing
from recoup.allocation.latency import RETRIES
from recoup.allocation.timing import network_seconds, operation_timings
from recoup.errors import BudgetError, UsageError
from recoup.inputs.batches import Inputs
from tests.recovery.bench import Fixed
from tests.test_methods import network_and_images
from tests.timers import Work
from tests.zoo import seeded

WORK = Work(layer=20000.0, element=10.0)


@pytest.fixture
def machine(monkeypatch):
    """Sets the timers of operations and of whole networks."""

    def install(operations, networks=None):
        monkeypatch.setattr(timing, "operation_timings", functools.partial(operation_timings, timer=operations))
        networks = functools.partial(network_seconds, timer=networks or operations)
        monkeypatch.setattr(timing, "network_seconds", networks)

    return install


def pruned(network, share, method="fast", **options):
    """The result, and the warnings about time."""
    model, images = network_and_images(network)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result = recoup.prune(model, list(images.split(50)), method=method, budget=Budget(latency=share), **options)
    return result, [str(w.message) for w in caught if "of the time" in str(w.message)]


@pytest.mark.parametrize("network", ["plain", "residual"])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_budget_of_time_is_met_and_not_by_much(machine, network, share):
    machine(WORK)
    model, images = network_and_images(network)
    result, told = pruned(network, share)
    before, after = network_seconds([model, result.model], Inputs((images[:50],), {}), WORK)
    assert 0.9 * share < after / before <= share
    latency = result.report.latency
    assert (latency.before, latency.asked) == (before, share)
    assert latency.after == after
    assert not told


def test_a_network_that_needs_a_standalone_graph_is_timed_in_that_form(machine):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 6)

        def forward(self, x):
            return self.head(torch.relu(self.b(torch.relu(self.a(x)))).view(-1, 16, 16).mean(2))

    machine(WORK)
    with seeded(0):
        model, images = Fixed().eval(), torch.randn(60, 3, 8, 8)
    result = recoup.prune(model, [images], budget=Budget(latency=0.6), method="fast")
    assert result.report.form is not None
    before, after = network_seconds([model, result.model], Inputs((images,), {}), WORK)
    assert after <= 0.6 * before


def test_where_whole_networks_shrink_less_than_their_operations_the_widths_are_cut_further(machine):
    timed = []

    def networks(run, device):
        timed.append(WORK(run, device))
        return timed[-1] ** 0.75

    machine(WORK, networks)
    result, told = pruned("residual", 0.6)
    believed, _ = (machine(WORK), pruned("residual", 0.6))[1]
    assert 0.54 < result.report.latency.share <= 0.6
    assert result.report.after.macs < believed.report.after.macs
    assert len(set(timed)) > 2  # the original, and more than one smaller network
    assert not told


def test_time_that_does_not_shrink_is_told_with_both_numbers(machine):
    smallest = []

    def networks(run, device):
        smallest.append(WORK(run, device))
        return 1e8 + smallest[-1]

    machine(WORK, networks)
    result, (told,) = pruned("plain", 0.6)
    latency = result.report.latency
    assert latency.share > 0.6
    assert f"takes {latency.share:.1%} of the time of the original, more than the 60.0% asked for" in told
    assert len(set(smallest)) == 1 + 1 + RETRIES
    assert latency.after == 1e8 + min(smallest)  # the fastest was kept
    assert told in result.report.warnings and f"warning: {told}" in str(result.report)


def test_all_of_the_time_keeps_everything(machine):
    machine(WORK, lambda run, device: torch.rand(()).item())  # a clock that is noise
    result, told = pruned("plain", 1.0)
    assert result.report.macs_removed == 0
    assert result.report.latency.share == 1.0
    assert not told


def test_the_report_tells_the_time(machine):
    machine(lambda run, device: 1e-9 * WORK(run, device))
    report = pruned("plain", 0.7)[0].report
    data = json.loads(json.dumps(report.to_json()))["latency"]
    assert data == {
        "before": report.latency.before,
        "after": report.latency.after,
        "asked": 0.7,
        "share": report.latency.share,
    }
    assert f"({report.latency.share:.1%} of it)" in str(report)


def test_other_budgets_take_no_time(machine):
    machine(lambda run, device: pytest.fail("nothing is to be timed"))
    model, images = network_and_images("plain")
    report = recoup.prune(model, [images], budget=Budget(macs=0.7), method="fast").report
    assert report.latency is None
    assert report.to_json()["latency"] is None
    assert "time of a batch" not in str(report)


def test_the_callers_model_and_batches_are_unchanged(machine):
    machine(WORK)
    model, images = network_and_images("residual")
    before, batch = {name: value.clone() for name, value in model.state_dict().items()}, images.clone()
    pruned("residual", 0.7)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(images, batch)
    assert not any(module.training for module in model.modules())


def test_the_first_batch_as_it_was_given_is_what_is_timed(monkeypatch):
    seen = []

    def timings(host, structure, inputs):
        seen.append(inputs.size)
        return operation_timings(host, structure, inputs, WORK)

    def networks(models, inputs):
        seen.append(inputs.size)
        return network_seconds(models, inputs, WORK)

    monkeypatch.setattr(timing, "operation_timings", timings)
    monkeypatch.setattr(timing, "network_seconds", networks)
    model, images = network_and_images("plain")
    batches = [(images[:7], torch.zeros(7)), (images[7:], torch.zeros(293))]
    recoup.prune(model, batches, budget=Budget(latency=0.9), method="fast")
    assert set(seen) == {7}


def test_a_budget_out_of_reach_is_refused(machine):
    machine(Work(layer=1e9))
    with pytest.raises(BudgetError, match=r"keeping 50.0% of the latency is out of reach"):
        pruned("plain", 0.5)


@pytest.mark.parametrize("method", ["paper", "released", recoup.Paper(selector="backward")])
def test_the_published_search_knows_no_time(machine, method):
    machine(lambda run, device: pytest.fail("nothing is to be timed"))
    with pytest.raises(UsageError, match="a latency budget needs widths that are measured.*method='best' or 'fast'"):
        pruned("plain", 0.5, method)


def test_a_graph_that_serves_one_batch_size_only_cannot_be_timed():
    with pytest.raises(UsageError, match="needs to time single operations.* ask for a share of the MACs"):
        recoup.prune(Fixed().eval(), [torch.randn(40, 3, 8, 8)], budget=Budget(latency=0.5))
