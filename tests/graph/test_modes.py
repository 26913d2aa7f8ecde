import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from recoup.graph.modes import exact_float32

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
