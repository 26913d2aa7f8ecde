"""A law: what is the caller's is the same, bit by bit, after success and after every kind of failure, for every method.

That is the model with its tensors, flags, hooks and attributes, the batches, the random number generators, the modes
and flags of torch, and what belongs to the process: warnings, logging, the garbage collector, paths, the environment.
"""

import gc
import logging
import math
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import recoup
from recoup import Budget, RecoupError, errors
from tests.zoo import seeded

METHODS = ("best", "fast", "paper", "released")
MACS = Budget(macs=0.6)


class Net(nn.Module):
    """Some of everything: batch norm, dropout, a tensor in an attribute, a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((1,), 1.5))
        self.sizes = {"seen": torch.zeros(3)}
        self.log = [1, 2]

    def forward(self, x):
        y = self.norm(self.a(x)).relu()
        return self.head(self.drop(self.b(y).relu().mean((2, 3)))) * self.scale


class Counting(Net):
    """Counts what it has seen, in eval mode too: in a buffer, in place, and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        self.seen.mul_(0.9).add_(0.1 * x.detach().mean())
        return y


class FailingError(Exception):
    """Raised by code of the caller's."""


class Failing(Net):
    """Never runs."""

    def forward(self, x):
        raise FailingError("the model says no")


class FailingLater(Net):
    """Is captured, and runs on few samples, but not on a batch."""

    def forward(self, x):
        if type(x) is torch.Tensor and len(x) > 8:
            raise FailingError("the model says no")
        return super().forward(x)


class Uncopyable(Net):
    def __deepcopy__(self, memo):
        raise FailingError("no copies")


def build(kind=Net):
    """A model in the middle of its life: hooks, gradients, parts in training mode and parts not."""
    with seeded(0):
        model = kind()
        Net.forward(model, torch.randn(8, 3, 8, 8)).square().sum().backward()
    model.train()
    model.norm.eval()
    model.head.weight.requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    model.a.register_forward_pre_hook(lambda *_: None)
    model.b.register_full_backward_hook(lambda *_: None)
    model.head.register_state_dict_pre_hook(lambda *_: None)
    return model


def images(count=30, seed=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(count=30):
    return torch.arange(count) % 4


def of_tensor(name, tensor):
    """What can be said of a tensor."""
    yield f"{name}: object", id(tensor)
    yield f"{name}: version", tensor._version
    yield f"{name}: bits", tensor.detach().numpy().tobytes()
    yield f"{name}: kind", (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor.is_leaf)
    if tensor.is_leaf and tensor.grad is not None:
        yield from of_tensor(f"{name}.grad", tensor.grad)


def of_value(name, value):
    """What can be said of an attribute: what it is, and what is in it."""
    yield f"{name}: object", value if isinstance(value, (bool, int, float, str)) else id(value)
    if isinstance(value, torch.Tensor):
        yield from of_tensor(name, value)
    elif isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from of_value(f"{name}[{key}]", item)


def of_model(model):
    for name, module in model.named_modules():
        yield f"{name}: class", type(module)
        yield f"{name}: attributes", tuple(vars(module))
        for attribute, value in vars(module).items():
            yield from of_value(f"{name}.{attribute}", value)


def of_torch():
    yield "gradients", (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())
    yield "defaults", (torch.get_default_dtype(), torch.get_default_device())
    yield "modes", (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    yield "autocast", [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
    yield "threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "deterministic", torch.get_deterministic_debug_mode()
    cudnn, backends = torch.backends.cudnn, torch.backends
    yield "cudnn", (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
    owners = [backends, cudnn, backends.cuda.matmul, getattr(cudnn, "conv", cudnn), getattr(cudnn, "rnn", cudnn)]
    yield "precisions", [getattr(owner, "fp32_precision", None) for owner in owners]
    yield "mkldnn", backends.mkldnn.enabled


def of_process():
    yield "random", (random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state()))
    yield "warnings", list(warnings.filters)
    yield "shown warnings", id(warnings.showwarning)
    yield "logging", (logging.root.manager.disable, logging.root.level, list(logging.root.handlers))
    known = {name: log for name, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    yield "loggers", {name: (known[name].level, known[name].disabled) for name in known if name in LOGGERS}
    yield "collector", (gc.isenabled(), gc.get_threshold(), list(gc.callbacks))
    yield "process", (list(sys.path), dict(os.environ), Path.cwd(), sys.getrecursionlimit(), sys.excepthook)
    yield "signals", [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield "threads of Python", threading.active_count()


# Those that are there before; torch makes more of them as it goes.
LOGGERS = frozenset(logging.root.manager.loggerDict)


def snapshot(model, batches):
    things = dict(of_model(model))
    for number, batch in enumerate(batches):
        things |= dict(of_tensor(f"batch {number}", batch))
    return {**things, **dict(of_torch()), **dict(of_process())}


def differences(before, after):
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def feed(batches, fails_at=None, error=None):
    """Batches from code that draws random numbers."""
    for number, batch in enumerate(batches):
        torch.rand(1), random.random(), np.random.rand()
        if number == fails_at:
            raise error
        yield batch


class Shuffled:
    """Validation in another order every time."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        yield images(40).roll(self.reads, 0), labels(40)


class BreaksLater:
    reads = 0

    def __iter__(self):
        self.reads += 1
        if self.reads > 1:
            raise FailingError("gone")
        yield images(40), labels(40)


def measure(good=math.inf, then=None):
    """An `evaluate` that draws random numbers and leaves the model in another mode, and fails after a while."""
    calls = []

    def evaluate(model):
        calls.append(1)
        torch.rand(1), model.train(not model.training)
        if len(calls) > good:
            if isinstance(then, BaseException):
                raise then
            return then
        return 90.0

    return evaluate


def interrupt(stage, error):
    def progress(current, *_):
        if current == stage:
            raise error

    return progress


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def run(method, batches, model=None, **options):
    goal = {} if {"tolerance", "budget"} & options.keys() else {"budget": MACS}
    recoup.prune(model, options.pop("data", None) or feed(batches), method=method, **goal, **options)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")

# Kind of failure: what is raised, and the options that lead to it; functions are called with the batches.
FAILURES = {
    "a budget that is none": (errors.UsageError, {"budget": 0.5}),
    "a tolerance that is none": (errors.UsageError, {"tolerance": "1"}),
    "an unknown group": (errors.UsageError, {"only": ["nothing"]}),
    "an impossible width": (errors.UsageError, {"widths": {"a": 100}}),
    "an impossible budget": (errors.BudgetError, {"budget": Budget(macs=1e-6)}),
    "all of it locked": (errors.LockedError, {"exclude": ["a", "b"]}),
    "a first batch that is none": (errors.CalibrationError, {"data": lambda b: feed([b[0].to_sparse()])}),
    "a later batch that is none": (errors.CalibrationError, {"data": lambda b: feed([*b, None])}),
    "a later batch with NaN": (errors.CalibrationError, {"data": lambda b: feed([*b, b[0] * math.nan])}),
    "a later batch of another kind": (errors.CalibrationError, {"data": lambda b: feed([*b, b[0].double()])}),
    "a first batch of another shape": (errors.CaptureError, {"data": lambda b: feed([b[0][:, :2]])}),
    "data that fail at once": (errors.CalibrationError, {"data": lambda b: feed(b, 0, FailingError())}),
    "data that fail later": (errors.CalibrationError, {"data": lambda b: feed(b, 1, FailingError())}),
    "an interrupt in the data": (KeyboardInterrupt, {"data": lambda b: feed(b, 1, KeyboardInterrupt())}),
    "a measure that fails": (RecoupError, {"tolerance": 1, "evaluate": lambda _: measure(0, FailingError())}),
    "a measure that fails later": (RecoupError, {"tolerance": 1, "evaluate": lambda _: measure(1, FailingError())}),
    "a measure without a number": (errors.CalibrationError, {"tolerance": 1.0, "evaluate": lambda _: measure(1)}),
    "an interrupt in the measure": (
        KeyboardInterrupt,
        {"tolerance": 1.0, "evaluate": lambda _: measure(1, KeyboardInterrupt())},
    ),
    "labels out of range": (errors.CalibrationError, {"validation": lambda _: [(images(40), labels(40) + 1)]}),
    "validation that is shuffled": (errors.CalibrationError, {"tolerance": 50, "validation": lambda _: Shuffled()}),
    "validation that fails later": (errors.CalibrationError, {"tolerance": 50, "validation": lambda _: BreaksLater()}),
    "a warning that is an error": (
        recoup.RecoupWarning,
        {"validation": lambda _: [(images(400), labels(400).flip(0))], "filter": "error"},
    ),
    "a model that fails at once": (errors.CaptureError, {"kind": Failing}),
    "a model that fails later": (errors.CalibrationError, {"kind": FailingLater}),
    "a model that cannot be copied": (errors.CaptureError, {"kind": Uncopyable}),
    "a model with infinite weights": (errors.CalibrationError, {"weight": math.inf}),
    "no memory for the graph": (errors.CaptureError, {"patch": ("torch.export.export", NO_MEMORY)}),
    "no memory for the statistics": (
        RecoupError,
        {"patch": ("recoup.algebra.moments.Accumulator.update", NO_MEMORY)},
    ),
    "no memory for the ranking": (MemoryError, {"patch": ("recoup.statistics.rank.problem_of", MemoryError())}),
    "no memory for the result": (MemoryError, {"patch": ("recoup._prune.apply", MemoryError())}),
    "a result that is not proven": (
        errors.VerificationError,
        {"patch": ("recoup._prune.verify", errors.VerificationError("differs"))},
    ),
    "a report that fails": (FailingError, {"patch": ("recoup._prune.make_report", FailingError())}),
}  # fmt: skip

# What every method says of its progress for a budget; interrupted at each.
STAGES = {
    "best": ("calibrate", "rank", "measure groups", "recover"),
    "fast": ("calibrate", "rank", "measure groups", "recover"),
    "paper": ("calibrate", "rank"),
    "released": ("calibrate", "rank"),
}


@pytest.fixture(autouse=True)
def quietly():
    """A random state that is nobody's, and no warnings on the screen: pytest puts the filters back."""
    with warnings.catch_warnings(), seeded(3):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAILURES)
def test_everything_is_as_before_after_a_failure(name, method, monkeypatch):
    error, options = FAILURES[name]
    options = dict(options)
    batches = [images(24), images(24, seed=2)]
    model = build(options.pop("kind", Net))
    if "weight" in options:
        model.a.weight.data[0] = options.pop("weight")
    if "patch" in options:
        target, raised = options.pop("patch")
        monkeypatch.setattr(target, raising(raised))
    warnings.simplefilter(options.pop("filter", "ignore"), recoup.RecoupWarning)
    options = {key: value(batches) if callable(value) else value for key, value in options.items()}
    before = snapshot(model, batches)
    with pytest.raises(error):
        run(method, batches, model, **options)
    assert differences(before, snapshot(model, batches)) == []


INTERRUPTS = [(method, stage, KeyboardInterrupt) for method in METHODS for stage in STAGES[method]]
INTERRUPTS += [(method, STAGES[method][-1], FailingError) for method in METHODS]


@pytest.mark.parametrize(("method", "stage", "error"), INTERRUPTS)
def test_everything_is_as_before_after_an_interrupt(method, stage, error):
    model, batches = build(), [images(24), images(24, seed=2)]
    before = snapshot(model, batches)
    with pytest.raises(error):
        run(method, batches, model, progress=interrupt(stage, error))
    assert differences(before, snapshot(model, batches)) == []


GOALS = {
    "budget": {},
    "width": {"budget": Budget(width=0.5)},
    "widths": {"budget": None, "widths": {"a": 3}},
    "tolerance": {"tolerance": 90.0, "validation": [(images(40), labels(40))]},
    "measure": {"tolerance": 1.0, "evaluate": measure()},
    "own class": {"keep_class": True},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GOALS)
def test_everything_is_as_before_after_success(name, method):
    model, batches = build(), [images(24), images(24, seed=2)]
    before = snapshot(model, batches)
    run(method, batches, model, **GOALS[name])
    assert differences(before, snapshot(model, batches)) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["budget", "tolerance", "measure"])
def test_a_model_that_keeps_count_does_not_count_our_work(name, method):
    model, batches = build(Counting), [images(24), images(24, seed=2)]
    before = snapshot(model, batches)
    run(method, batches, model, **GOALS[name])
    assert differences(before, snapshot(model, batches)) == []


MODES = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a device": lambda: torch.device("meta"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_caller_are_on_afterwards(mode):
    model, batches = build(), [images(24), images(24, seed=2)]
    with MODES[mode]():
        before = snapshot(model, batches)
        run("fast", batches, model)
        with pytest.raises(KeyboardInterrupt):
            run("fast", batches, model, progress=interrupt("recover", KeyboardInterrupt))
        assert differences(before, snapshot(model, batches)) == []


def test_flags_of_the_caller_are_on_afterwards(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", not cudnn.benchmark)
    monkeypatch.setattr(cudnn, "deterministic", not cudnn.deterministic)
    logging.disable(logging.WARNING)
    gc.disable()
    try:
        model, batches = build(), [images(24), images(24, seed=2)]
        before = snapshot(model, batches)
        run("best", batches, model)
        assert differences(before, snapshot(model, batches)) == []
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_steps_and_measures_leave_everything_as_it_was():
    model, batches = build(Counting), [images(24), images(24, seed=2)]
    before = snapshot(model, batches)
    recoup.inspect(model, batches[0])
    recoup.accuracy(model, [(batches[0], labels(24))])
    recoup.divergence(model, model, batches)
    with pytest.raises(errors.CalibrationError):
        recoup.accuracy(model, [(batches[0], labels(24) + 1)])
    method = recoup.Paper()
    seen = recoup.calibrate(recoup.trace(model, batches[0]), recoup.split(model, batches, held_out=False), method)
    plan = recoup.recover(seen, recoup.allocate(seen, recoup.rank(seen), recoup.Goal(budget=MACS))).plan
    recoup.verify(model, plan, recoup.apply(model, plan), batches[0])
    assert differences(before, snapshot(model, batches)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.a.weight.data.mul_(1 + 1e-7),
        lambda m: m.norm.running_mean.add_(1e-7),
        lambda m: m.norm.train(),
        lambda m: m.a._forward_pre_hooks.clear(),
        lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone(), requires_grad=False)),
        lambda m: m.b.bias.requires_grad_(False),
        lambda m: m.b.bias.grad.zero_(),
        lambda m: m.sizes["seen"].add_(1),
        lambda m: m.log.append(3),
        lambda _: torch.rand(1),
        lambda _: random.random(),
        lambda _: np.random.rand(),
        lambda _: warnings.simplefilter("always", ImportWarning),
        lambda _: sys.path.append(sys.path.pop(0)),
        lambda _: torch.set_grad_enabled(False),
    ],
)
def test_a_snapshot_sees_every_change(change):
    model, path, filters = build(), list(sys.path), list(warnings.filters)
    before = snapshot(model, [])
    try:
        change(model)
        assert differences(before, snapshot(model, []))
    finally:
        torch.set_grad_enabled(True)
        sys.path[:] = path
        warnings.filters[:] = filters
