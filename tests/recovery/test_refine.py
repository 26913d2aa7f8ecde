import functools

import pytest
import torch
from torch import nn

from recoup.recovery.refine import _Descent, refine
from recoup.recovery.twin_run import TwinRun
from recoup.surgery.apply import apply
from recoup.surgery.verify import verify
from tests.recovery.bench import Judged, Shaped, Written, bench, zoo_bench
from tests.timers import Ticking
from tests.zoo import ZOO, seeded


@functools.cache
def chain():
    with seeded(0):
        layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.ReLU())]
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *layers, nn.Linear(16, 5)).double().eval()
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        half = {str(2 * number): torch.arange(16) < 8 for number in range(3)}
        return bench(model, torch.randn(2000, 8).double(), half)


def refined(found, seconds, **options):
    return refine(found.calibration, found.split, found.keep, found.start, seconds, **options)


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_it_goes_on_until_its_time_is_over(monkeypatch, seconds):
    """The clock is read once for every step."""
    steps, step = [], _Descent._step
    monkeypatch.setattr("recoup.recovery.refine.time", Ticking(0.01))
    monkeypatch.setattr(_Descent, "_step", lambda self, values: steps.append(None) or step(self, values))
    refined(chain(), seconds)
    assert len(steps) == pytest.approx(100 * seconds, abs=1.5)


def test_every_layer_changes():
    found = chain()
    plan = refined(found, 0.8)
    changed = [layer for layer in "0246" if not torch.equal(plan.weights[f"{layer}.bias"], before_of(found, layer))]
    assert changed == ["0", "2", "4", "6"]


def before_of(found, layer):
    return found.start.weights.get(f"{layer}.bias", found.calibration.parameters[f"{layer}.bias"])


def test_no_time_at_all_changes_nothing():
    found = chain()
    plan = refined(found, 0.0)
    assert all(torch.equal(plan.weights[name], value) for name, value in found.start.weights.items())


def test_the_output_error_on_held_out_images_falls():
    found = chain()
    assert found.reference.error(refined(found, 0.8).weights) < 0.9 * found.reference.error(found.start.weights)


@pytest.mark.parametrize("name", ZOO)
def test_pruned_inputs_keep_zero_weights_and_sliced_equals_masked(name):
    found = zoo_bench(name, seed=5)
    plan = refined(found, 0.1)
    structure = found.calibration.structure
    for consumer in structure.consumers:
        cut = ~structure.keep_indices(consumer.inputs, found.keep)
        if consumer.weight in plan.weights:
            assert not plan.weights[consumer.weight].movedim(consumer.input_dim, 0)[cut].any()
    assert all(bool(value.isfinite().all()) for value in plan.weights.values())
    proof = verify(found.model, plan, apply(found.model, plan), found.calibration.traced.inputs)
    assert proof.difference < 1e-8


def test_rows_of_pruned_channels_are_as_before():
    found = chain()
    plan = refined(found, 0.5)
    assert torch.equal(plan.weights["0.weight"][8:], found.model[0].weight.detach()[8:])
    assert not torch.equal(plan.weights["0.weight"][:8], found.model[0].weight.detach()[:8])


def test_the_plan_keeps_what_it_kept():
    found = chain()
    plan = refined(found, 0.2)
    assert all(torch.equal(mask, plan.keep[name]) for name, mask in found.start.keep.items())
    assert plan.recovery == found.start.recovery


def test_a_network_that_writes_into_what_others_read_cannot_be_refined():
    with seeded(0):
        found = bench(Written().double().eval(), torch.randn(60, 3, 8, 8).double(), {"a": torch.arange(8) < 4})
    assert refined(found, 5.0) is None


def test_a_network_whose_layers_are_all_called_twice_cannot_be_refined():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 5)

        def forward(self, x):
            for _ in range(2):
                x = self.b(torch.tanh(self.a(x)))
            return x

    with seeded(0):
        found = bench(Twice().double().eval(), torch.randn(60, 5).double(), {"a": torch.arange(8) < 4})
    assert not found.schedule.points and found.start.weights
    assert refined(found, 5.0) is None


def test_progress_is_told_in_hundredths():
    told = []
    refined(chain(), 0.5, progress=lambda *step: told.append(step))
    counts = [done for stage, done, of in told if (stage, of) == ("refine", 100)]
    assert len(counts) == len(told)
    assert counts == sorted(set(counts)) and counts[-1] == 100


def test_the_model_and_the_start_are_as_before():
    found = chain()
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    start = {name: value.clone() for name, value in found.start.weights.items()}
    refined(found, 0.3)
    assert all(torch.equal(value, before[name]) for name, value in found.model.state_dict().items())
    assert all(torch.equal(value, start[name]) for name, value in found.start.weights.items())
    assert all(parameter.grad is None for parameter in found.model.parameters())


@pytest.mark.parametrize("step", [torch.special.bessel_j0, lambda x: torch.heaviside(x, torch.zeros_like(x))])
def test_a_network_without_a_derivative_cannot_be_refined(step):
    class Hard(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 5)

        def forward(self, x):
            return step(self.b(torch.relu(self.a(x))))

    with seeded(0):
        found = bench(Hard().double().eval(), torch.randn(60, 5).double(), {"a": torch.arange(8) < 4})
    assert refined(found, 5.0) is None


def test_a_number_for_the_whole_batch_and_a_mask_take_no_part():
    with seeded(0):
        found = bench(Judged().double().eval(), torch.randn(600, 8).double(), {"b": torch.arange(16) < 8})
    assert found.reference.error(refined(found, 0.8).weights) < found.reference.error(found.start.weights)


def test_what_is_returned_need_not_have_the_samples_first():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 7)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))).T

    with seeded(0):
        found = bench(Turned().double().eval(), torch.randn(600, 5).double(), {"a": torch.arange(8) < 4})
    plan = refined(found, 0.5)
    assert not torch.equal(plan.weights["a.weight"], found.calibration.parameters["a.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_refined_too(dtype):
    with seeded(0):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)).to(dtype)
        half = {name: torch.arange(16) < 8 for name in "02"}
        found = bench(model.eval(), torch.randn(1000, 8).to(dtype), half)
    plan = refined(found, 1.5)
    assert plan.weights["0.weight"].dtype == dtype
    assert found.reference.error(plan.weights) < 0.95 * found.reference.error(found.start.weights)


def test_nothing_is_left_on_disk(monkeypatch):
    closed, close = [], TwinRun.close

    def watched(twin):
        closed.append(twin)
        close(twin)

    monkeypatch.setattr(TwinRun, "close", watched)
    refined(chain(), 0.1)
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("way", "kept", "is_last"),
    [("none", 5, True), ("reshape", 5, True), ("view_as", 5, False), ("view_as", 1, False)],
    ids=["plain", "reshape", "neither network", "not the original"],
)
def test_images_lie_with_their_channels_last_unless_a_network_goes_by_their_order(way, kept, is_last, monkeypatch):
    """A map of one channel is the same in both orders, so the smaller network may do with what the original cannot."""
    with seeded(0):
        found = bench(Shaped(way).eval(), torch.randn(60, 3, 8, 8), {"a": torch.arange(8) < kept})
    layouts, run = [], TwinRun.run

    def watched(self, segment, values, *others):
        layouts.append(values["x"].is_contiguous(memory_format=torch.channels_last))
        return run(self, segment, values, *others)

    monkeypatch.setattr(TwinRun, "run", watched)
    assert refined(found, 0.3) is not None
    assert layouts[-1] == is_last
