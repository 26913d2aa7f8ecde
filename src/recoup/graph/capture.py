"""Capture a model as an ATen graph with `torch.export`, for one batch or for sizes that are symbols."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import TreeSpec, tree_map

from recoup.graph.copies import copied, light_copy, working_copy
from recoup.graph.functional import make_functional
from recoup.graph.masks import choose_by_masks
from recoup.graph.modes import exporting, symbolic_len
from recoup.graph.refusals import not_captured, not_run, shown
from recoup.graph.regions import open_regions
from recoup.inputs.batches import Inputs
from recoup.inputs.surroundings import as_the_caller

# Relations between sizes beyond which they are not followed: most networks have some twenty, windows of windows
# thousands, over which torch reasons for minutes.
MOST_CONDITIONS = 200
# The same of the operations in them: a rounding within a rounding, as windows of a fixed size ask for at every layer,
# takes torch seconds each.
MOST_OPERATIONS = 2000
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
    `ran` names the modules that were called.
    """

    graph: fx.Graph
    tensors: Mapping[str, str]
    values: Mapping[str, Tensor]
    constants: frozenset[str]
    signature: Signature
    ran: frozenset[str]


class TooManyConditionsError(Exception):
    """The code asks for so many relations between sizes that following them all would take too long."""


def capture(model: nn.Module, inputs: Inputs, *, can_run: bool = True, ran: dict[str, None] | None = None) -> Captured:
    """The graph of `model` in eval mode on `inputs`; the model itself is not touched.

    A model that was only made to be captured cannot run. The names of the modules that run are noted in `ran`, the last
    one that started at the end; where the capture fails, that is where.

    Raises:
        CaptureError: the forward pass fails on these inputs, or uses something `torch.export` cannot follow.
    """
    ran = {} if ran is None else ran
    return _captured(export(model, inputs, can_run=can_run, ran=ran), model, frozenset(ran))


def export(
    model: nn.Module,
    inputs: Inputs,
    follow: Callable[[Any], Any] | None = None,
    *,
    can_run: bool = True,
    ran: dict[str, None] | None = None,
) -> torch.export.ExportedProgram:
    """What torch.export makes of a light copy; `follow` gives for every argument which of its sizes are symbolic.

    The names of the modules that run are noted in `ran`, the last one to start at the end.

    What writes into the graph's own values gives new ones. Gradients are off, so that a region of the code that
    switches them off is no graph of its own.

    Raises:
        CaptureError: the forward pass fails on these inputs, or uses something `torch.export` cannot follow.
        TooManyConditionsError: symbolic sizes ask too much.
    """
    twin = light_copy(model)
    if ran is not None:
        for name, module in twin.named_modules():
            module.register_forward_pre_hook(functools.partial(_note, ran, name))
    args, kwargs = tuple(inputs.args), dict(inputs.kwargs)
    try:
        with exporting(), torch.no_grad(), as_the_caller():
            if follow is None:
                return _plain(torch.export.export(twin, args, kwargs, strict=False))
            limit = _Limit()
            for module in twin.modules():
                module.register_forward_pre_hook(limit)
            with symbolic_len():
                shapes = tree_map(follow, dict(signature(twin.forward).bind(*args, **kwargs).arguments))
                return _plain(torch.export.export(twin, args, kwargs, dynamic_shapes=shapes, strict=False))
    except TooManyConditionsError:
        raise
    except Exception as error:  # torch.export raises its own errors and passes on those of user code
        if can_run and follow is None:
            _check_runs(working_copy(model), inputs)  # says what is wrong with the inputs, if that is what it is
        raise not_captured(model, error) from shown(error)


def input_nodes(captured: Captured) -> list[fx.Node]:
    """The arguments of the captured function, in order."""
    return [node for node in captured.graph.nodes if node.op == "placeholder" and node.name not in captured.tensors]


def module_path(node: fx.Node) -> str:
    """Dotted name of the innermost module the node was recorded in; empty for the model's own forward."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return re.sub(r"@\d+", "", paths[-1]) if paths else ""  # a repeated call may carry its number


@dataclass(slots=True)
class _Limit:
    """Ends a capture whose sizes take too much reasoning; asked before every module, by work and not by the clock."""

    conditions: int = 0
    operations: int = 0

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        modes = (getattr(value, "fake_mode", None) for value in args)
        environment = next((mode.shape_env for mode in modes if mode is not None), None)
        if environment is None:
            return
        self.operations += sum(int(guard.expr.count_ops()) for guard in environment.guards[self.conditions :])
        self.conditions = len(environment.guards)
        if self.conditions > MOST_CONDITIONS or self.operations > MOST_OPERATIONS:
            raise TooManyConditionsError


def _plain(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without regions that change nothing, and without writes into its own values."""
    open_regions(program.graph_module)
    make_functional(program.graph)
    choose_by_masks(program.graph)
    return program


def _note(ran: dict[str, None], name: str, *_: Any) -> None:
    ran.pop(name, None)
    ran[name] = None


def _captured(program: Any, model: nn.Module, ran: frozenset[str]) -> Captured:
    specs = program.graph_signature.input_specs
    graph, name_of = _with_stable_names(program.graph)
    stored = {name_of[spec.arg.name]: spec.target for spec in specs if spec.kind in _STORED}
    lifted = {name_of[spec.arg.name]: spec.target for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}
    held = {**program.state_dict, **program.constants}
    values = {name: held[target] for name, target in {**stored, **lifted}.items()}
    constants = {name: f"constants.{target}" for name, target in lifted.items()}
    _drop_plain_inputs(graph, {name_of[s.arg.name]: s.arg.value for s in specs if isinstance(s.arg, ConstantArgument)})
    known = program.module_call_graph[0].signature.forward_arg_names
    names = tuple(getattr(model, "input_names", None) or known or ())
    signature = Signature(names, program.call_spec.in_spec, program.call_spec.out_spec)
    return Captured(graph, {**stored, **constants}, values, frozenset(constants.values()), signature, ran)


def _with_stable_names(graph: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """A copy whose nodes keep their names when it is copied again, and what each was called before.

    torch.export may call an input `input`, which a copy renames, as it is a name of Python's.
    """
    copy, twins = copied(graph)
    return copy, {old.name: new.name for old, new in twins.items()}


def _drop_plain_inputs(graph: fx.Graph, values: Mapping[str, Any]) -> None:
    """Arguments such as None or a number were written into the graph; their places remain in the call."""
    for node in graph.nodes:
        if node.name in values:
            node.meta["val"], node.meta["plain"] = None, values[node.name]


def _check_runs(model: nn.Module, inputs: Inputs) -> None:
    try:
        with torch.no_grad():
            inputs.call(model)
    except Exception as error:  # user code
        raise not_run(model, inputs, error) from shown(error)
