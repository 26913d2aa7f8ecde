"""Watch the layers of a running model: every product with a known weight, whether a module or a function calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

from recoup.algebra.patches import Window
from recoup.operators.record import Reading, operator_of


class Listener(Protocol):
    """Told of each call: the layer's input, its output, and the window of a convolution (None: linear)."""

    def __call__(self, inputs: Tensor, outputs: Tensor, window: Window | None, /) -> None:
        """Take note."""
        ...


class Observer(TorchFunctionMode):
    """While active, calls the listener of a weight whenever a layer multiplies by it."""

    def __init__(self, listeners: Mapping[int, Listener]) -> None:
        """Listeners by `id` of the weight."""
        super().__init__()
        self._listeners = listeners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, then tell."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(id(weight) in self._listeners for weight in _weights(func, args, kwargs)):
            for reading in readings(func, args, kwargs, result):
                listener = self._listeners.get(id(reading.weight))
                if listener is not None:
                    listener(reading.inputs, reading.outputs(result).detach(), reading.window)
        return result


def layer_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a layer's call by name; empty for an operation that is no layer."""
    layer = operator_of(target).layer
    return {} if layer is None else {**dict(zip(layer.arguments, args, strict=False)), **kwargs}


def read_by(target: Any, call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    """What a layer reads, and the window it does so by (None: linear)."""
    layer = operator_of(target).layer
    assert layer is not None
    return layer.read(call)


def readings(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Iterator[Reading]:
    """What a call reads for each of its weights, in the order of `weights_of`; nothing if it is no layer.

    `result` is what it returned; a call with one weight need not have been run.
    """
    record = operator_of(target)
    if record.layer is not None:
        call = layer_call(target, args, kwargs)
        inputs, window = read_by(target, call)
        yield Reading(call.get("weight"), inputs, window)
    elif record.recurrent is not None:
        yield from record.recurrent.read(target, args, result)


def _weights(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    record = operator_of(target)
    if record.recurrent is not None:
        return tuple(weight for weight, _ in record.recurrent.layers(args))
    return (layer_call(target, args, kwargs).get("weight"),)
