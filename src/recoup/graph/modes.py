"""Modes to work in: each is set in a `with` block and put back, even when the body raises.

Most of them belong to the process, and several threads may be at work in it. The first thread that comes in sets such a
mode, the last that leaves puts it back: whatever the order, it is then as it was.
"""

from __future__ import annotations

import builtins
import functools
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensor

P = ParamSpec("P")
T = TypeVar("T")

# While torch.export runs, oneDNN and cuDNN are off in the whole process, and `torch.compiler.is_exporting` says so to
# every model: what other threads compute meanwhile is rounded otherwise or takes other branches. It also fails where
# precisions are mixed. So of the threads that export, change precisions or compute a plan, one at a time.
_lock = threading.RLock()
_evaluation_lock = threading.Lock()


class SharedMode:
    """A mode of the process: `set_it` sets it and returns what puts it back."""

    def __init__(self, set_it: Callable[[], Callable[[], None]]) -> None:
        self._set_it, self._lock, self._users = set_it, threading.RLock(), 0
        self._put_back: Callable[[], None] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The mode, until the last thread that is in it leaves."""
        with self._lock:
            if not self._users:
                self._put_back = self._set_it()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._put_back is not None:
                    self._put_back()


@dataclass(slots=True)
class _Held:
    """A module that is held in eval mode: by how many, and whether it was in training before."""

    users: int
    training: bool


_held: dict[int, _Held] = {}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the flags of every module are put back afterwards."""
    modules = list(model.modules())
    with _evaluation_lock:
        for module in modules:
            _held.setdefault(id(module), _Held(0, module.training)).users += 1
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with _evaluation_lock:
            for module in modules:
                _let_go(module)


def _let_go(module: nn.Module) -> None:
    held = _held[id(module)]
    held.users -= 1
    if not held.users:
        del _held[id(module)]
        if held.training:
            module.training = True


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """The function, for which a second thread has to wait: it computes what it would compute alone."""

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock:
            return function(*args, **kwargs)

    return waiting


@contextmanager
def exporting() -> Iterator[None]:
    """The only thread that exports, and without torch's warnings and logs about it."""
    with _lock, quiet():
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from warning and logging about what is caught and said again; other threads may still warn."""
    with _without_logs(), hushed(Warning):
        yield


@contextmanager
def hushed(category: type[Warning]) -> Iterator[None]:
    """No warnings of this kind from this thread."""
    with _with_filter():
        kinds = _hushed_kinds()
        kinds.append(category)
        try:
            yield
        finally:
            kinds.remove(category)


_thread = threading.local()


def _hushed_kinds() -> list[type[Warning]]:
    kinds: list[type[Warning]] = _thread.__dict__.setdefault("kinds", [])
    return kinds


class _HushedKind(type):
    """Has as its subclasses the kinds of warnings that the thread which asks wants to hear nothing of."""

    def __subclasscheck__(cls, category: type) -> bool:
        return any(issubclass(category, kind) for kind in _hushed_kinds())


class _Hushed(Warning, metaclass=_HushedKind):
    """`warnings` knows filters by category, not by thread; this category depends on the thread."""


# As `warnings` keeps them: action, message, category, module, line.
_FILTER: Any = ("ignore", None, _Hushed, None, 0)


def _set_filter() -> Callable[[], None]:
    """One entry before all others, which is taken out again: what others add meanwhile stays."""
    filters: Any = warnings.filters
    filters.insert(0, _FILTER)
    return _remove_filter


def _remove_filter() -> None:
    filters: Any = warnings.filters
    while _FILTER in filters:
        filters.remove(_FILTER)


def _disable_logs() -> Callable[[], None]:
    level = logging.root.manager.disable
    logging.disable(max(level, logging.ERROR))
    return lambda: logging.disable(level)


def _disable_collection() -> Callable[[], None]:
    was_on = gc.isenabled()
    gc.disable()
    return gc.enable if was_on else gc.disable


def _set_exact_float32() -> Callable[[], None]:
    with ExitStack() as switches:
        for owner, name, exact in _precisions():
            switches.enter_context(_switched(owner, name, exact))
        return switches.pop_all().close


_with_filter = SharedMode(_set_filter)
_without_logs = SharedMode(_disable_logs)
# Hold Python's garbage collector back: it would look through growing graphs again and again.
without_collection = SharedMode(_disable_collection)
_exact_float32 = SharedMode(_set_exact_float32)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Switch off the reduced-precision float32 modes of convolutions and products, and put them back after."""
    with _lock, _exact_float32():
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
