"""What the caller has switched on around a call: set aside while we work, and as it was afterwards.

Our own tensors must not depend on a default device, on autocast or on inference mode. The caller's model and data may:
they run under the caller's default device, by `as_the_caller`. Random numbers that they draw are given back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")

CPU = torch.device("cpu")
# What torch writes into the environment when it first captures a model.
LEFT_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
# The caller's default device while one of our steps runs; None outside of them.
_DEFAULT: ContextVar[torch.device | None] = ContextVar("default device of the caller", default=None)


def undisturbed(step: Callable[P, R]) -> Callable[P, R]:
    """A public step that runs in no mode of the caller's, and leaves random number generators as they were."""

    @wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _DEFAULT.get() is not None:  # within another step
            return step(*args, **kwargs)
        with _modes_set_aside(), _random_numbers_given_back(), _environment_given_back():
            return step(*args, **kwargs)

    return run


@contextmanager
def as_the_caller() -> Iterator[None]:
    """The caller's default device, for code of the caller's: it may count on it."""
    device = _DEFAULT.get()
    if device is None or device == CPU:
        yield
        return
    with device:
        yield


@contextmanager
def _modes_set_aside() -> Iterator[None]:
    default = torch.get_default_device()
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(mode=False))
            modes.enter_context(torch.no_grad())  # as in the caller's mode
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if default != CPU:
            modes.enter_context(CPU)
        token = _DEFAULT.set(default)
        modes.callback(_DEFAULT.reset, token)
        yield


@contextmanager
def _random_numbers_given_back() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices: list[Any] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)


@contextmanager
def _environment_given_back() -> Iterator[None]:
    was_there = LEFT_BY_TORCH in os.environ
    try:
        yield
    finally:
        if not was_there:
            os.environ.pop(LEFT_BY_TORCH, None)
