"""What a user is told of a model that torch.export cannot follow: the line of the code, and what to prune instead."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch import nn

from recoup.errors import CaptureError
from recoup.inputs.batches import Inputs

# What classes call the part of them that does the heavy work.
_BACKBONES = ("backbone", "encoder", "features", "trunk")
MOST_CODE = 60
# Characters of a cause that is shown; torch.export may add its whole graph to one.
MOST_SHOWN = 2000
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_CACHE = re.compile(r"Found <class '.*Cache'> in output")
_ASKS_FOR_VALUES = ("data-dependent", "DataDependent", "aten._local_scalar_dense", "aten.nonzero")


def not_captured(model: nn.Module, error: BaseException) -> CaptureError:
    """The error for a forward pass that runs and cannot be captured."""
    name, line = type(model).__name__, users_line(error)
    told = f"{type(error).__name__}: {brief(error)}"
    asks = any(word in f"{type(error).__name__} {error}" for word in _ASKS_FOR_VALUES)
    if _CACHE.search(str(error)):
        return CaptureError(
            f"{name} cannot be captured by torch.export: it returns a cache of its past, which a graph cannot hold. "
            "Have it return none, as use_cache=False in its config or in the batches does."
        )
    if asks and line:
        why = f"{line} asks for the values of a tensor, which are not known beforehand ({type(error).__name__}). "
        why += "Compute both ways and choose with torch.where, move that part out of the model"
    else:
        at = f" at {line}" if line else ""
        why = f"{told}{at}. Its forward pass likely branches on tensor values or leaves torch; move that part out of it"
    return CaptureError(f"{name} cannot be captured by torch.export: {why}, or prune {heavy_part(model)}.")


def not_run(model: nn.Module, inputs: Inputs, error: BaseException) -> CaptureError:
    """The error for a forward pass that fails."""
    hint = "samples lie along its first dimension, so a single one is x[None]"
    if any(isinstance(value, (list, tuple)) for value in (*inputs.args, *inputs.kwargs.values())):
        hint = "samples lie along the first dimension of every tensor in a list. For a detector, prune "
        hint += heavy_part(model)
    line = users_line(error)
    return CaptureError(
        f"{type(model).__name__} fails on inputs of shape {inputs.shapes()} ({type(error).__name__}: {brief(error)})"
        f"{f' at {line}' if line else ''}. Check the shape, dtype and number of inputs in the first calibration batch; "
        f"{hint}."
    )


def shown(error: BaseException) -> BaseException | None:
    """The cause to go with an error of ours, unless it fills the screen."""
    return error if len(str(error)) <= MOST_SHOWN else None


def brief(error: BaseException) -> str:
    """The first line of an error, cut to a readable length."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else ""


def users_line(error: BaseException) -> str:
    """The last line of the user's own code that an error went through, as `net.py:12 (if x.sum() > 0:)`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    code = f" ({own[-1].line[:MOST_CODE]})" if own[-1].line else ""
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}{code}"


def heavy_part(model: nn.Module) -> str:
    """The part of a model that is called its backbone, or that holds most of its parameters, in words."""
    whole, parts = _size(model), dict(model.named_children())
    called = next((name for name in _BACKBONES if name in parts and _layers(parts[name]) > 1), None)
    path, part = (f".{called}", parts[called]) if called else ("", model)
    while called is None:
        children = [(name, child) for name, child in part.named_children() if _layers(child) > 1]
        name, child = max(children, key=lambda item: _size(item[1]), default=("", part))
        if not name or _size(child) < whole / 2:
            break
        path, part = f"{path}.{name}", child
        if len(children) > 1:
            break
    if not path:
        return "the part that does the heavy work"
    return f"the part that does the heavy work: model{path} has {_size(part) / whole:.0%} of the parameters"


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _layers(module: nn.Module) -> int:
    return sum(bool(part._parameters) for part in module.modules())
