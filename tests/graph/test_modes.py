import gc
import logging
import random
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recoup.graph.modes import (
    _precisions,
    evaluating,
    exact_float32,
    exporting,
    hushed,
    quiet,
    without_collection,
)

# From the state in which nobody has chosen a precision, to which no process can return, through others.
PROGRAM = """
import torch
from recoup.graph.modes import exact_float32

b = torch.backends
operations = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn)
legacy = (lambda: b.cudnn.allow_tf32, lambda: b.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision)

def read(switch):
    try:
        return switch()
    except RuntimeError:
        return "mixed"

def seen():
    return [one.fp32_precision for one in (b, b.cudnn, b.mkldnn.matmul, *operations)] + [read(one) for one in legacy]

def state():
    '''What all switches say, and what they would say if another precision were chosen for all.'''
    before, found = b.fp32_precision, [seen()]
    for b.fp32_precision in ("ieee", "tf32", "none"):
        found.append(seen())
    b.fp32_precision = before
    return found

def is_exact():
    return [one.fp32_precision for one in operations] == ["ieee"] * 3

for setting in {settings}:
    exec(setting)
    before = state()
    try:
        with exact_float32():
            assert is_exact(), (setting, seen())
            with exact_float32():
                assert is_exact(), (setting, seen())
            assert is_exact(), (setting, seen())
            raise KeyError
    except KeyError:
        pass
    assert state() == before, (setting, before, state())
"""
SETTINGS = [
    "",
    "b.fp32_precision = 'tf32'",
    "b.fp32_precision = 'bf16'",
    "b.fp32_precision = 'ieee'",
    "b.fp32_precision = 'none'; b.cudnn.fp32_precision = 'tf32'",
    "b.fp32_precision = 'tf32'; b.cudnn.fp32_precision = 'ieee'",
    "b.fp32_precision = b.cudnn.fp32_precision = 'none'",
    "b.cuda.matmul.fp32_precision = 'tf32'",
    "b.cudnn.conv.fp32_precision = 'tf32'; b.cudnn.rnn.fp32_precision = 'ieee'",
    "b.cuda.matmul.fp32_precision = b.cudnn.conv.fp32_precision = b.cudnn.rnn.fp32_precision = 'none'",
    "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = True",
    "b.cuda.matmul.allow_tf32 = b.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('medium')",
]


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9 has no precisions to set")
def test_float32_is_exact_inside_and_every_switch_as_it_was_after():
    program = PROGRAM.replace("{settings}", repr(SETTINGS))
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_torch_without_precisions_has_its_older_switches_set(monkeypatch, allowed):
    cudnn, matmul = SimpleNamespace(allow_tf32=allowed), SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(torch, "backends", SimpleNamespace(cudnn=cudnn, cuda=SimpleNamespace(matmul=matmul)))
    with pytest.raises(KeyError), exact_float32():
        assert not cudnn.allow_tf32
        assert not matmul.allow_tf32
        raise KeyError
    assert (cudnn.allow_tf32, matmul.allow_tf32) == (allowed, True)


def switches():
    precision = [getattr(owner, name) for owner, name, _ in _precisions()]
    return gc.isenabled(), logging.root.manager.disable, list(warnings.filters), precision


@pytest.mark.parametrize("mode", [quiet, without_collection, exact_float32, exporting])
@pytest.mark.parametrize("first_out", [0, 1])
def test_a_mode_lasts_until_the_last_is_out_and_is_then_as_it_was(mode, first_out):
    before, contexts = switches(), [mode(), mode()]
    for context in contexts:
        context.__enter__()
    inside = switches()
    contexts[first_out].__exit__(None, None, None)
    assert switches() == inside != before
    contexts[1 - first_out].__exit__(None, None, None)
    assert switches() == before


@pytest.mark.parametrize("first_out", [0, 1])
def test_a_model_is_in_eval_mode_until_the_last_is_out(first_out):
    model = nn.Sequential(nn.Linear(2, 2).eval(), nn.Dropout())
    before, contexts = [m.training for m in model.modules()], [evaluating(model), evaluating(model[1])]
    for context in contexts:
        context.__enter__()
    contexts[first_out].__exit__(None, None, None)
    assert not model[1].training
    contexts[1 - first_out].__exit__(None, None, None)
    torch.set_grad_enabled(True)  # a matter of each thread, in which contexts end in the order they began
    assert [m.training for m in model.modules()] == before == [True, False, True]


def test_threads_in_any_order_leave_everything_as_it_was():
    before, model = switches(), nn.Dropout()

    def work(seed):
        draw = random.Random(seed)
        for _ in range(200):
            mode = draw.choice([quiet, without_collection, exact_float32, exporting, lambda: evaluating(model)])
            with mode():
                if draw.random() < 0.5:
                    with draw.choice([quiet, exact_float32])():
                        threading.Event().wait(1e-5)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert switches() == before
    assert model.training


def test_a_thread_that_is_quiet_does_not_silence_another():
    inside, done = threading.Event(), threading.Event()

    def work():
        with quiet():
            warnings.warn("not heard", UserWarning, stacklevel=1)
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=work)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        inside.wait(10)
        warnings.warn("heard", UserWarning, stacklevel=1)
        done.set()
        thread.join()
    assert [str(warning.message) for warning in caught] == ["heard"]


def test_only_the_kind_that_is_hushed_is_not_heard():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hushed(FutureWarning), hushed(UserWarning):
            for kind in (FutureWarning, UserWarning, DeprecationWarning):
                warnings.warn("a word", kind, stacklevel=1)
        warnings.warn("a word", FutureWarning, stacklevel=1)
    assert [warning.category for warning in caught] == [DeprecationWarning, FutureWarning]
