"""What a model has to be to be worked on: a module of plain Python, with parameters that hold numbers."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recoup.errors import CaptureError, ModelError, require_kind

# Modules that pack weights as integers, or that measure and round for it.
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic", "torch.ao.nn.qat", "torch.ao.quantization")
_STUBS = "torch.ao.quantization.stubs"  # they do nothing


def require_model(model: object) -> None:
    """Refuse what is no module with parameters that hold numbers.

    Raises:
        UsageError: it is no module.
        CaptureError: it has no parameters, or is TorchScript or quantised, or something in it is.
        ModelError: its parameters hold no numbers yet, or cannot be computed with.
    """
    require_kind("model", model, nn.Module, "a torch.nn.Module, made and loaded")
    assert isinstance(model, nn.Module)
    name = type(model).__name__
    for path, part in model.named_modules():
        _require_python(path, part, name)
    if next(iter(model.parameters()), None) is None:
        raise CaptureError(f"{name} has no parameters, so there is nothing to prune or measure in it.")
    for tensor_name, tensor in chain(model.named_parameters(), model.named_buffers()):
        _require_numbers(f"{name}: {tensor_name}", tensor)


def _require_python(path: str, part: nn.Module, name: str) -> None:
    what = f"{name}: {path}" if path else name
    kind, origin = type(part).__name__, type(part).__module__
    if isinstance(part, torch.jit.ScriptModule):
        raise CaptureError(
            f"{what} is TorchScript, which has no Python code to capture. Give the model it was made from."
        )
    if origin.startswith(_QUANTISED) and not origin.startswith(_STUBS):
        raise CaptureError(f"{what} is quantised ({kind}), so there are no plain weights. Prune before you quantise.")


def _require_numbers(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ModelError(f"{name} has no size yet. Run the model once on a batch, then prune it.")
    if tensor.is_meta:
        raise ModelError(f"{name} is on the meta device and holds no numbers. Load the weights first.")
    if tensor.is_inference():
        raise ModelError(
            f"{name} was made in torch.inference_mode, which forbids to compute derivatives. Make or load the model "
            "outside of it, or give copy.deepcopy(model), made outside of it."
        )
