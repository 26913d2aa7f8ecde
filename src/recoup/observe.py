"""Watch the layers of a running model: every product with a known weight, whether a module or a function calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recoup.algebra.patches import Window

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class Listener(Protocol):
    """Told of each call: the layer's input, its output, and the window of a convolution (None: linear)."""

    def __call__(self, inputs: Tensor, outputs: Tensor, window: Window | None, /) -> None:
        """Take note."""
        ...


class Observer(TorchFunctionMode):
    """While active, calls the listener of a weight whenever a convolution or linear layer multiplies by it."""

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
        if func in _CONVOLUTIONS or func is F.linear:
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            call = {**dict(zip(names, args, strict=False)), **kwargs}
            listener = self._listeners.get(id(call["weight"]))
            if listener is not None:
                self._tell(listener, call, result, _CONVOLUTIONS.get(func))
        return result

    def _tell(self, listener: Listener, call: dict[str, Any], result: Tensor, spatial: int | None) -> None:
        inputs, window = call["input"].detach(), None
        if spatial is not None:
            window = window_of(call, tuple(call["weight"].shape[2:]))
            inputs = inputs if inputs.dim() == spatial + 2 else inputs[None]
        listener(inputs, result.detach(), window)


def window_of(call: Mapping[str, Any], kernel: tuple[int, ...]) -> Window:
    """Kernel, stride, dilation and padding of a convolution's call."""
    stride = _per_dim(call.get("stride", 1), kernel)
    dilation = _per_dim(call.get("dilation", 1), kernel)
    padding = call.get("padding", 0)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return Window(kernel, stride, dilation, tuple((n // 2, n - n // 2) for n in total))
    return Window(kernel, stride, dilation, tuple((n, n) for n in _per_dim(padding, kernel)))


def _per_dim(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * len(kernel) if len(values) == 1 else values
