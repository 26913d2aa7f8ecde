"""Copies of the caller's model to work on, so that the original is never touched."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from recoup.errors import CaptureError


def working_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode without the caller's hooks; hooks by which torch itself computes weights stay."""
    return strip_hooks(duplicate(model)).eval()


def light_copy(model: nn.Module) -> nn.Module:
    """A working copy that shares the model's tensors: for a look at its code, never to be run or written into."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return strip_hooks(duplicate(model, shared)).eval()


def duplicate(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of the model, or a clear refusal; objects in `shared`, by `id`, are not copied."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about the trees in its graph modules
            return copy.deepcopy(model, shared)
    except Exception as error:  # user code may raise anything from __deepcopy__
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Recoup works on a copy and "
            "never on your model: make it deep-copyable, for example by detaching tensors it stores in attributes."
        ) from error


def strip_hooks(twin: nn.Module) -> nn.Module:
    """`twin`, a copy of ours, without the hooks that came along from the caller's model."""
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            _drop_foreign(hooks)
    return twin


def _drop_foreign(hooks: dict[int, Callable[..., Any]]) -> None:
    for key in [key for key, hook in hooks.items() if not type(hook).__module__.startswith("torch.nn.utils")]:
        del hooks[key]


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
