from contextlib import contextmanager, nullcontext

import pytest
import torch

from recoup.algebra.cuda_graph import REHEARSALS, RecordedStep

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CALLS = REHEARSALS + 4


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def adding(total):
    def step(values):
        total.add_(values["x"].sum() * values["factor"])

    return step


def test_every_call_runs_the_step_once_on_its_own_values(device):
    total = torch.zeros((), device=device)
    recorded = RecordedStep(adding(total), device)
    for number in range(CALLS):
        recorded({"x": torch.full((3,), float(number), device=device), "factor": 2})
    assert float(total) == 6 * sum(range(CALLS))


def test_a_step_may_have_no_values(device):
    count = torch.zeros((), device=device)
    recorded = RecordedStep(lambda _: count.add_(1), device)
    for _ in range(CALLS):
        recorded()
    assert int(count) == CALLS


@pytest.mark.parametrize("other", [{"x": torch.ones(5), "factor": 2}, {"x": torch.ones(3), "factor": 5}])
def test_values_unlike_the_recorded_ones_are_not_taken_for_them(device, other):
    total = torch.zeros((), device=device)
    recorded = RecordedStep(adding(total), device)
    for _ in range(CALLS):
        recorded({"x": torch.ones(3, device=device), "factor": 2})
    before = float(total)
    recorded({"x": other["x"].to(device), "factor": other["factor"]})
    assert float(total) - before == len(other["x"]) * other["factor"]


def test_a_step_that_waits_for_the_device_is_run_as_it_is(device):
    total, seen = torch.zeros((), device=device), []

    def step(values):
        seen.append(float(values["x"]))
        total.add_(values["x"])

    recorded = RecordedStep(step, device)
    for number in range(CALLS):
        recorded({"x": torch.tensor(float(number), device=device)})
    assert float(total) == sum(range(CALLS))
    assert seen == [float(number) for number in range(CALLS)]


def test_gradient_steps_are_the_same_as_without(device):
    torch.manual_seed(0)
    target = torch.randn(4, device=device)
    found = []
    for wrap in (lambda step: lambda values: step(values), lambda step: RecordedStep(step, device)):
        weight = torch.zeros(4, device=device, requires_grad=True)
        optimiser = torch.optim.Adam([weight], lr=torch.tensor(0.1, device=device), capturable=device.type == "cuda")

        def step(values, weight=weight, optimiser=optimiser):
            optimiser.zero_grad()
            ((weight - target) * values["x"]).square().sum().backward()
            optimiser.step()

        run = wrap(step)
        for number in range(CALLS):
            run({"x": torch.tensor(1.0 + number, device=device)})
        found.append(weight.detach().clone())
    torch.testing.assert_close(*found)


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt, which would end pytest."""


def interrupted_when_recorded():
    calls = []

    def step(_):
        calls.append(None)
        if len(calls) == REHEARSALS + 1:
            raise Interrupted

    return step


def test_an_interruption_passes_and_leaves_nothing_recording(device):
    recorded = RecordedStep(interrupted_when_recorded(), device)
    for _ in range(REHEARSALS):
        recorded()
    with pytest.raises(Interrupted):
        recorded()
    assert float(torch.rand(3, device=device).sum()) > 0  # neither a copy to the host nor chance may be recorded


@pytest.mark.parametrize(("error", "passes"), [(RuntimeError, False), (ValueError, True), (Interrupted, True)])
def test_whatever_ends_a_step_ends_its_recording(monkeypatch, error, passes):
    events = []

    @contextmanager
    def recording(graph, stream=None):
        events.append("begin")
        try:
            yield
        finally:
            events.append("end")
            raise RuntimeError("the recording has failed")

    def step(_):
        raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr("recoup.algebra.cuda_graph._record_nothing", lambda: events.append("nothing"))
    replay = RecordedStep(step, torch.device("cpu"))
    with pytest.raises(error) if passes else nullcontext():
        assert replay._recorded() is None
    assert events == ["begin", "end", "nothing"]
