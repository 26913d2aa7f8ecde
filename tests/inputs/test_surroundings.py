import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import recoup
from recoup.inputs.surroundings import as_the_caller, undisturbed
from tests.zoo import ZOO

ENTRY = ZOO["plain"]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "device": lambda: default_device("meta"),
    "device, for a while": lambda: torch.device("meta"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}


def pruned(mode=None, method="fast", **options):
    model, batch = ENTRY.build(4), ENTRY.batch(30)
    if mode is None:
        return recoup.prune(model, [batch], budget=recoup.Budget(macs=0.6), method=method, **options)
    with MODES[mode]():
        return recoup.prune(model, [batch], budget=recoup.Budget(macs=0.6), method=method, **options)


@pytest.fixture(scope="module")
def expected():
    return {"best": pruned(method="best"), "paper": pruned(method="paper")}


@pytest.mark.parametrize("method", ["best", "paper"])
@pytest.mark.parametrize("mode", MODES)
def test_the_result_does_not_depend_on_what_the_caller_has_switched_on(expected, mode, method):
    result = pruned(mode, method)
    left, right = (dict(each.model.state_dict()) for each in (expected[method], result))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)
    assert not any(parameter.is_inference() for parameter in result.model.parameters())


def test_steps_by_themselves_run_in_no_mode():
    model, batch = ENTRY.build(4), ENTRY.batch(30)
    with torch.inference_mode(), torch.device("meta"):
        traced, data = recoup.trace(model, batch), recoup.split(model, [batch])
        seen = recoup.calibrate(traced, data, recoup.Fast())
        allocation = recoup.allocate(seen, recoup.rank(seen), recoup.Goal(budget=recoup.Budget(width=0.5)))
        plan = recoup.recover(seen, allocation).plan
        smaller = recoup.apply(model, plan)
        assert recoup.verify(model, plan, smaller, batch).difference < 1e-10
        assert recoup.divergence(smaller, model, [batch]) >= 0


class Shifted(nn.Module):
    """Counts on the default device."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.devices = []

    def forward(self, x):
        self.devices.append(torch.zeros(1).device.type)
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def test_the_callers_model_and_measure_run_under_the_callers_default_device():
    model, seen = Shifted(), []

    def evaluate(candidate):
        seen.append(torch.zeros(1).device.type)
        return 90.0

    def batches():
        seen.append(torch.zeros(1).device.type)
        yield torch.randn(40, 5, device="cpu")

    with torch.device("meta"):
        recoup.prune(model, batches(), evaluate=evaluate, tolerance=1.0, method=recoup.Paper(classifier=True))
    assert set(seen) == {"meta"} and len(seen) > 2
    assert model.devices == []  # a copy ran


def test_within_a_step_the_callers_device_is_known_and_ours_is_the_cpu():
    @undisturbed
    def step():
        with as_the_caller():
            callers = torch.zeros(1).device.type
        return torch.zeros(1).device.type, callers

    assert step() == ("cpu", "cpu")
    with torch.device("meta"):
        assert step() == ("cpu", "meta")
        assert torch.zeros(1).device.type == "meta"


def test_random_numbers_that_the_callers_code_draws_are_given_back():
    @undisturbed
    def step(fails):
        torch.rand(3), random.random(), np.random.rand()
        if fails:
            raise KeyError

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    step(fails=False)
    assert states() == before
    with pytest.raises(KeyError):
        step(fails=True)
    assert states() == before
