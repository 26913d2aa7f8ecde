"""Watch the layers of a running model: every product with a known weight, whether a module or a function calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

from recoup.algebra.patches import Window, stuff
from recoup.structure.operations import operation_name

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
# The names of the arguments of every layer, in order.
_LAYERS = {
    **{f"conv{n}d": _CONVOLUTION for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)},
    "convolution": (*_CONVOLUTION[:6], "transposed", "output_padding", "groups"),
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(("matmul", "mm", "__matmul__"), ("input", "weight")),
    "addmm": ("bias", "input", "weight"),
}  # fmt: skip


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
        call = layer_call(func, args, kwargs)
        listener = self._listeners.get(id(call.get("weight")))
        if listener is not None:
            inputs, window = read_by(func, call)
            listener(inputs, result.detach(), window)
        return result


def layer_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a layer's call by name; empty for an operation that is no layer."""
    name = operation_name(target)
    return {**dict(zip(_LAYERS[name], args, strict=False)), **kwargs} if name in _LAYERS else {}


def read_by(target: Any, call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    """What a layer reads, and the window it does so by (None: linear)."""
    return _seen(operation_name(target), call)


def _seen(name: str, call: Mapping[str, Any]) -> tuple[Tensor, Window | None]:
    """A layer's input as patches are taken from it: with a batch, and zeros between for a transposed convolution."""
    inputs = call["input"].detach()
    if not name.startswith("conv"):
        return inputs, None
    kernel = tuple(call["weight"].shape[2:])
    inputs = inputs if inputs.dim() == len(kernel) + 2 else inputs[None]
    if "transpose" not in name and not call.get("transposed", False):
        return inputs, window_of(call, kernel)
    return stuff(inputs, _per_dim(call.get("stride", 1), kernel)), transposed_window_of(call, kernel)


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


def transposed_window_of(call: Mapping[str, Any], kernel: tuple[int, ...]) -> Window:
    """The window that a transposed convolution moves over its input with zeros between: stride 1, kernel flipped."""
    dilation, padding, extra = (_per_dim(call.get(n, d), kernel) for n, d in _TRANSPOSED_DEFAULTS)
    reach = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    border = tuple((n, n + more) for n, more in zip(reach, extra, strict=True))
    return Window(kernel, (1,) * len(kernel), dilation, border, flipped=True)


_TRANSPOSED_DEFAULTS = (("dilation", 1), ("padding", 0), ("output_padding", 0))


def _per_dim(value: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * len(kernel) if len(values) == 1 else values
