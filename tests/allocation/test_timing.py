import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.allocation.timing import network_seconds, operation_timings, seconds_of
from recoup.inputs.batches import Inputs
from tests.timers import Work
from tests.zoo import ZOO

CPU = torch.device("cpu")


class Clock:
    """Runs that take known times, one after the other; the last one again and again."""

    def __init__(self, *durations):
        self.durations, self.now, self.runs = durations, 0.0, 0

    def __call__(self):
        return self.now

    def run(self):
        self.now += self.durations[min(self.runs, len(self.durations) - 1)]
        self.runs += 1


def timings_of(model, batch, timer, **options):
    traced = recoup.trace(model, batch, **options)
    inputs = Inputs(batch if isinstance(batch, tuple) else (batch,), {})
    return traced, operation_timings(traced.standalone.host, traced.structure, inputs, timer)


def test_the_median_counts_and_the_first_runs_do_not():
    clock = Clock(50.0, 9.0, 0.01, 0.02, 0.3, 0.01, 0.02, 0.02, 0.03)
    assert seconds_of(clock.run, CPU, clock) == pytest.approx(0.02)
    assert clock.runs == 2 + 7


def test_short_runs_are_repeated_until_the_clock_can_tell():
    clock = Clock(1e-4)
    assert seconds_of(clock.run, CPU, clock) == pytest.approx(1e-4)
    assert clock.runs == 2 + 7 * 10


def test_runs_too_short_to_be_seen_end():
    clock = Clock(0.0)
    assert seconds_of(clock.run, CPU, clock) == 0.0
    assert clock.runs == 2 + 7 * 100


def test_long_runs_are_few():
    clock = Clock(60.0)
    assert seconds_of(clock.run, CPU, clock) == 60.0
    assert clock.runs == 2 + 3


def test_a_gpu_is_waited_for_before_and_after(monkeypatch):
    told, clock = [], Clock(0.1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append((device, clock.runs)))
    seconds_of(clock.run, torch.device("cuda", 1), clock)
    assert {device for device, _ in told} == {torch.device("cuda", 1)}
    assert [runs for _, runs in told] == [n for runs in range(clock.runs) for n in (runs, runs + 1)]


def test_real_seconds_grow_with_the_work():
    small, large = nn.Linear(8, 8).eval(), nn.Linear(1500, 3000).eval()
    inputs = [torch.randn(100, layer.in_features) for layer in (small, large)]
    seconds = [network_seconds([layer], Inputs((x,), {}))[0] for layer, x in zip((small, large), inputs, strict=True)]
    assert 0 < seconds[0] < seconds[1]


def test_networks_are_timed_in_turns_and_the_median_turn_counts():
    models, readings, order = (
        [nn.Linear(3, 4).train(), nn.Linear(3, 8).eval()],
        iter([9.0, 5.0, 1.0, 4.0, 2.0, 6.0]),
        [],
    )

    def timer(run, device):
        result = run()
        assert not result.requires_grad and not any(models[place].training for place in [len(order) % 2])
        order.append(result.shape[1])
        return next(readings)

    assert network_seconds(models, Inputs((torch.randn(2, 3),), {}), timer) == [2.0, 5.0]
    assert order == [4, 8] * 3
    assert [model.training for model in models] == [True, False]


def test_a_batch_that_the_network_writes_into_stays_as_it_is():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(F.silu(self.a(x.mul_(2.0)), inplace=True))

    model, batch = Writes().eval(), torch.randn(4, 5)
    before = batch.clone()
    traced = recoup.trace(model, batch.clone())
    results = []

    def timer(run, device):
        results.append([run(), run()])
        return 1.0

    operation_timings(traced.standalone.host, traced.structure, Inputs((batch,), {}), timer)
    network_seconds([model], Inputs((batch,), {}), Work())
    assert torch.equal(batch, before)
    assert all(torch.equal(first, again) for first, again in results)  # repeating is no other work
    expected = F.silu(F.linear(2 * before, model.a.weight, model.a.bias))
    assert any(first.shape == (4, 6) and torch.allclose(first, expected) for first, _ in results)


@pytest.mark.parametrize("name", ZOO)
def test_every_operation_is_timed_on_the_values_it_gets(name):
    """The last results are those of the network."""
    entry, results = ZOO[name], []
    model, batch = entry.build(), entry.batch(3)

    def timer(run, device):
        results.append(run())
        return 1.0

    traced, timings = timings_of(model, batch, timer)
    assert {product.node for product in traced.structure.products} <= timings.keys()
    assert all(timing.seconds == pytest.approx(1.0) for timing in timings.values())
    with torch.no_grad():
        outputs = model(*batch) if isinstance(batch, tuple) else model(batch)
    for expected in outputs.values() if isinstance(outputs, dict) else [outputs]:
        assert any(r.shape == expected.shape and torch.allclose(r, expected) for r in results if torch.is_tensor(r))


def half(layer, inputs, outputs, transposed=False):
    """The layer's function with its first inputs and outputs only."""
    weight = layer.weight[:inputs, :outputs] if transposed else layer.weight[:outputs, :inputs]
    return weight.detach(), layer.bias[:outputs].detach()


LAYERS = {
    "convolution": (
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        lambda layer, x: F.conv2d(x[:, :3], *half(layer, 3, 4), stride=2, padding=1),
    ),
    "odd": (nn.Conv2d(6, 7, 3, padding="same"), lambda layer, x: F.conv2d(x[:, :3], *half(layer, 3, 3), padding=1)),
    "dilated": (nn.Conv2d(6, 8, 3, dilation=2), lambda layer, x: F.conv2d(x[:, :3], *half(layer, 3, 4), dilation=2)),
    "transposed": (
        nn.ConvTranspose2d(6, 10, 3, stride=2, output_padding=1),
        lambda layer, x: F.conv_transpose2d(x[:, :3], *half(layer, 3, 5, transposed=True), stride=2, output_padding=1),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_convolution_is_timed_with_half_of_its_channels_too(name):
    layer, expected = LAYERS[name]
    model, batch = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), layer, nn.Conv2d(layer.out_channels, 2, 1)), []
    x = torch.randn(2, 3, 9, 9)
    _, _ = timings_of(model.eval(), x, lambda run, device: batch.append(run()) or 1.0)
    with torch.no_grad():
        read = model[1](model[0](x))
    halves = [result for result in batch if result.shape == expected(layer, read).shape]
    assert any(torch.allclose(result, expected(layer, read), atol=1e-6) for result in halves)


def test_a_linear_layer_is_timed_with_half_of_its_channels_too():
    model, x, results = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(2, 4, 5), []
    timings_of(model, x, lambda run, device: results.append(run()) or 1.0)
    with torch.no_grad():
        read = model[1](model[0](x))
    expected = F.linear(read[..., :4], *half(model[2], 4, 3))
    assert any(r.shape == expected.shape and torch.allclose(r, expected, atol=1e-6) for r in results)


def test_seconds_at_any_width_are_told_from_those_that_scale():
    model = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(7, 9, 3), nn.Conv2d(9, 4, 1))
    traced, timings = timings_of(model.eval(), torch.randn(2, 3, 8, 8), Work(layer=1000.0))
    macs = [2 * 64 * 9 * 3 * 7, 2 * 64 * 9 * 7 * 9, 2 * 100 * 9 * 4]
    for product, expected in zip(traced.structure.products, macs, strict=True):
        assert timings[product.node].fixed == pytest.approx(1000.0)
        assert timings[product.node].scaled == pytest.approx(expected)


@pytest.mark.parametrize(("whole", "half", "scaled"), [(4.0, 5.0, 0.0), (4.0, 0.5, 4.0), (4.0, 2.5, 2.0)])
def test_no_part_of_the_time_is_negative(whole, half, scaled):
    """Half the channels may seem to take longer than all of them, or less than a quarter of their time."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))

    def timer(run, device):
        return whole if run().shape[1] in (16, 4) else half

    x = torch.randn(3, 8)
    traced, timings = timings_of(model, x, timer)
    timing = timings[traced.structure.products[0].node]
    assert (timing.fixed, timing.scaled) == (pytest.approx(whole - scaled), pytest.approx(scaled))


def test_a_depthwise_convolution_is_timed_once_and_grows_with_its_channels():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1))
    calls = []
    traced, timings = timings_of(model.eval(), torch.randn(2, 3, 8, 8), lambda run, device: calls.append(run()) or 3.0)
    assert len(calls) == 2 + 1 + 2
    timing = timings[traced.structure.products[1].node]
    assert (timing.fixed, timing.scaled) == (0.0, 3.0)


def test_the_layout_in_memory_stays_when_channels_are_halved():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last).eval()
    results = []
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    timings_of(model, x, lambda run, device: results.append(run()) or 1.0)
    assert len(results) == 4
    assert all(result.is_contiguous(memory_format=torch.channels_last) for result in results)
