"""Modes to work in: each is set in a `with` block and put back, even when the body raises."""

from __future__ import annotations

import builtins
import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the flags of every module are put back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from warning and logging about what is caught and said again."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold Python's garbage collector back: it would look through growing graphs again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def exact_float32() -> Iterator[None]:
    """Switch off the reduced-precision float32 modes of convolutions and products, and put them back after."""
    with ExitStack() as switches:
        for owner, name, exact in _precisions():
            switches.enter_context(_switched(owner, name, exact))
        yield


def _precisions() -> list[tuple[Any, str, Any]]:
    """What holds a precision, the name it has there and its exact value: what is for all before what is for some."""
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    if not hasattr(cudnn, "conv"):  # torch before 2.9
        return [(cudnn, "allow_tf32", False), (matmul, "allow_tf32", False)]
    return [(owner, "fp32_precision", "ieee") for owner in (backends, cudnn, matmul, cudnn.conv, cudnn.rnn)]


@contextmanager
def _switched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Nothing is written where the value is there already: torch cannot be told again that nobody has chosen one."""
    before = getattr(owner, name)
    if before == value:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def symbolic_len() -> Iterator[None]:
    """Let `len` of a tensor with symbolic sizes be the symbol: Python's own insists on a number, and fixes the size.

    For every other object, and so for other threads, it is what it was.
    """
    own = builtins.len

    def length(value: Any, /) -> Any:
        return value.shape[0] if isinstance(value, FakeTensor) and value.dim() else own(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = own
