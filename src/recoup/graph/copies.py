"""Copies of the caller's model to work on, so that the original is never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from recoup.errors import CaptureError
from recoup.graph.modes import hushed


def working_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode without the caller's hooks; hooks by which torch itself computes weights stay."""
    return strip_hooks(duplicate(model)).eval()


def light_copy(model: nn.Module) -> nn.Module:
    """A working copy that shares the model's tensors: for a look at its code, never to be run or written into."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return strip_hooks(duplicate(model, shared)).eval()


def duplicate(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of the model, or a clear refusal; objects in `shared`, by `id`, are not copied."""
    try:
        with hushed(FutureWarning):  # torch's own, about the trees in its graph modules
            return copy.deepcopy(model, shared)
    except Exception as error:  # user code may raise anything from __deepcopy__
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Recoup works on a copy and "
            "never on your model: make it deep-copyable, for example by detaching tensors it stores in attributes."
        ) from error


def strip_hooks(twin: nn.Module) -> nn.Module:
    """`twin`, a copy of ours, without the hooks that came along from the caller's model."""
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            _drop_foreign(hooks)
    return twin


def _drop_foreign(hooks: dict[int, Callable[..., Any]]) -> None:
    for key in [key for key, hook in hooks.items() if not type(hook).__module__.startswith("torch.nn.utils")]:
        del hooks[key]


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and the new node for each old one but the output."""
    copy = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, twins))
    return copy, twins
