"""A step that is repeated many times, recorded once: a GPU waits for the launch of small operations, not for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

Values: TypeAlias = Mapping[str, Any]
T = TypeVar("T")
NOTHING: Values = MappingProxyType({})

# A step is run so many times before it is recorded, so that whatever is made at first use is there.
REHEARSALS = 3


class RecordedStep:
    """A step on some values, by name. On a GPU it is recorded after a few calls, and replayed for values like those.

    A step must not wait for the GPU, and leaves what it has found in tensors that stay where they are. One that cannot
    be recorded is run as it is.
    """

    def __init__(self, step: Callable[[Values], None], device: torch.device) -> None:
        self._step, self._device, self._calls = step, device, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._values: dict[str, Any] = {}

    def __call__(self, values: Values = NOTHING) -> None:
        """Run the step once."""
        self._calls += 1
        if self._stream is not None and self._calls <= REHEARSALS:
            self._aside(self._stream, lambda: self._step(values))
            return
        if self._stream is not None and self._calls == REHEARSALS + 1:
            self._values = {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}
            self._graph = self._aside(self._stream, self._recorded)
        if self._graph is None or not _are_alike(values, self._values):
            self._step(values)
            return
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._values[name].copy_(value)
        self._graph.replay()

    def _recorded(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._step(self._values)
        except BaseException as error:
            _record_nothing()
            cause = _first_cause(error)
            if isinstance(cause, RuntimeError):  # an operation that waits for the GPU, or is not made for recording
                return None
            raise cause from None
        return graph

    def _aside(self, stream: torch.cuda.Stream, action: Callable[[], T]) -> T:
        """Act on a stream of its own, as recording has to, in line with what comes before and after."""
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = action()
        current.wait_stream(stream)
        return result


def _record_nothing() -> None:
    """A recording that works: after one that failed, random numbers would still be waiting for its end."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _first_cause(error: BaseException) -> BaseException:
    """What ended the step: the recording, which could not be finished then, raises an error of its own on top."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _are_alike(values: Values, others: Values) -> bool:
    return values.keys() == others.keys() and all(_kind(value) == _kind(others[name]) for name, value in values.items())


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
