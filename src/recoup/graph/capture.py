"""Capture a model as an ATen graph with `torch.export`, for a batch of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import TreeSpec

from recoup.errors import CaptureError
from recoup.graph.copies import copied, light_copy, working_copy
from recoup.graph.modes import exporting
from recoup.inputs.batches import Inputs

_STORED = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """How the captured function is called: the names and tree of its arguments, the tree of what it returns."""

    names: tuple[str, ...]
    inputs: TreeSpec
    outputs: TreeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """The graph of a model.

    `tensors` gives, for each placeholder that is a parameter or a buffer, that tensor's dotted name, and `values` the
    tensor; both also hold constants written into the code, which no name of the model leads to (`constants`).
    """

    graph: fx.Graph
    tensors: Mapping[str, str]
    values: Mapping[str, Tensor]
    constants: frozenset[str]
    signature: Signature


def capture(model: nn.Module, inputs: Inputs, *, can_run: bool = True) -> Captured:
    """The graph of `model` in eval mode on `inputs`; the model itself is not touched.

    A model that was only made to be captured cannot run.

    Raises:
        CaptureError: the forward pass fails on these inputs, or uses something `torch.export` cannot follow.
    """
    twin = light_copy(model)
    try:
        with exporting():
            program = torch.export.export(twin, tuple(inputs.args), dict(inputs.kwargs), strict=False)
    except Exception as error:  # torch.export raises its own errors and passes on those of user code
        if can_run:
            _check_runs(working_copy(model), inputs)  # says what is wrong with the inputs, if that is what it is
        raise CaptureError(
            f"{type(model).__name__} cannot be captured by torch.export ({type(error).__name__}: {_brief(error)}). Its "
            "forward pass likely branches on tensor values or leaves torch; move that part out of the model, or prune "
            "the sub-module that does the heavy work."
        ) from error
    return _captured(program)


def module_path(node: fx.Node) -> str:
    """Dotted name of the innermost module the node was recorded in; empty for the model's own forward."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return re.sub(r"@\d+", "", paths[-1]) if paths else ""  # a repeated call may carry its number


def _captured(program: Any) -> Captured:
    specs = program.graph_signature.input_specs
    graph, name_of = _with_stable_names(program.graph)
    stored = {name_of[spec.arg.name]: spec.target for spec in specs if spec.kind in _STORED}
    lifted = {name_of[spec.arg.name]: spec.target for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}
    held = {**program.state_dict, **program.constants}
    values = {name: held[target] for name, target in {**stored, **lifted}.items()}
    constants = {name: f"constants.{target}" for name, target in lifted.items()}
    _drop_plain_inputs(graph, {name_of[s.arg.name] for s in specs if isinstance(s.arg, ConstantArgument)})
    names = tuple(program.module_call_graph[0].signature.forward_arg_names or ())
    signature = Signature(names, program.call_spec.in_spec, program.call_spec.out_spec)
    return Captured(graph, {**stored, **constants}, values, frozenset(constants.values()), signature)


def _with_stable_names(graph: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """A copy whose nodes keep their names when it is copied again, and what each was called before.

    torch.export may call an input `input`, which a copy renames, as it is a name of Python's.
    """
    copy, twins = copied(graph)
    return copy, {old.name: new.name for old, new in twins.items()}


def _drop_plain_inputs(graph: fx.Graph, names: set[str]) -> None:
    """Arguments such as None or a number were written into the graph; their places remain in the call."""
    for node in graph.nodes:
        if node.name in names:
            node.meta["val"] = None


def _check_runs(model: nn.Module, inputs: Inputs) -> None:
    try:
        with torch.no_grad():
            inputs.call(model)
    except Exception as error:  # user code
        raise CaptureError(
            f"{type(model).__name__} fails on inputs of shape {inputs.shapes()} ({type(error).__name__}: "
            f"{_brief(error)}). Check the shape, dtype and number of inputs in the first calibration batch."
        ) from error


def _brief(error: Exception) -> str:
    """The first line of an error, cut to a readable length."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else ""
