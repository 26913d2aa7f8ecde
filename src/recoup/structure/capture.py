"""Capture a model as an ATen graph with `torch.export`, for one sample."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from recoup.batches import Inputs, tensors_in
from recoup.errors import CalibrationError, CaptureError
from recoup.structure.copying import working_copy


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """The graph, and for each of its placeholders that is a parameter or a buffer, that tensor's dotted name."""

    graph: fx.Graph
    tensors: Mapping[str, str]


def capture(model: nn.Module, inputs: Inputs) -> Captured:
    """The graph of `model` in eval mode on the first sample of `inputs`; the model itself is not touched.

    Raises:
        CaptureError: the forward pass fails on these inputs, or uses something `torch.export` cannot follow.
    """
    twin = working_copy(model)
    single = inputs.first(1)
    _check_runs(twin, single)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(twin, tuple(single.args), dict(single.kwargs), strict=False)
    except Exception as error:  # torch.export raises its own errors and passes on those of user code
        raise CaptureError(
            f"{type(model).__name__} cannot be captured by torch.export ({type(error).__name__}: {_brief(error)}). Its "
            "forward pass likely branches on tensor values or leaves torch; move that part out of the model, or prune "
            "the sub-module that does the heavy work."
        ) from error
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    tensors = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.kind in kinds and spec.target is not None
    }
    return Captured(program.graph, tensors)


def module_path(node: fx.Node) -> str:
    """Dotted name of the innermost module the node was recorded in; empty for the model's own forward."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return re.sub(r"@\d+", "", paths[-1]) if paths else ""  # a repeated call may carry its number


def _check_runs(model: nn.Module, inputs: Inputs) -> None:
    try:
        with torch.no_grad():
            results = tensors_in(inputs.call(model))
    except Exception as error:  # user code
        raise CaptureError(
            f"{type(model).__name__} fails on inputs of shape {inputs.shapes()} ({type(error).__name__}: "
            f"{_brief(error)}). Check the shape, dtype and number of inputs in the first calibration batch."
        ) from error
    if not all(bool(result.isfinite().all()) for result in results):
        raise CalibrationError(
            f"{type(model).__name__} returns NaN or infinite values for the first sample. Check its weights and how "
            "the inputs are normalised."
        )


def _brief(error: Exception) -> str:
    """The first line of an error, cut to a readable length."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else ""
