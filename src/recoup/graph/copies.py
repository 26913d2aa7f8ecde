"""Copies of the caller's model to work on, so that the original is never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx, nn

from recoup.errors import CaptureError
from recoup.graph.modes import hushed


def working_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode."""
    return duplicate(model).eval()


def light_copy(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """A copy in eval mode that shares the model's tensors: for a look at its code, never to be run or written into.

    With `own_buffers` it shares parameters only, and a forward pass that keeps notes has its own to keep them in.
    """
    tensors = (*model.parameters(), *(() if own_buffers else model.buffers()))
    return duplicate(model, {id(tensor): tensor for tensor in tensors}).eval()


def duplicate(model: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of the model, or a clear refusal; objects in `shared`, by `id`, are not copied."""
    try:
        with hushed(FutureWarning):  # torch's own, about the trees in its graph modules
            return copy.deepcopy(model, {**_computed(model), **(shared or {})})
    except Exception as error:  # user code may raise anything from __deepcopy__
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Recoup works on a copy and "
            "never on your model: make it deep-copyable, for example by detaching tensors it stores in attributes."
        ) from error


def _computed(model: nn.Module) -> dict[int, Tensor]:
    """Copies of what was computed from parameters and left in an attribute, which torch refuses to copy itself.

    Weight norm and pruning masks of torch.nn.utils leave the weight they computed there, and compute it anew each time.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value.detach().clone() for value in held if isinstance(value, Tensor) and not value.is_leaf}


def hooked(model: nn.Module) -> list[str]:
    """Names of the modules with hooks of the caller's that may change what the forward pass returns."""
    return [
        name
        for name, module in model.named_modules()
        if any(_is_foreign(hook) for hooks in _forward_hooks(module) for hook in hooks.values())
    ]


def strip_hooks(twin: nn.Module) -> nn.Module:
    """`twin`, a copy of ours, without the caller's hooks; hooks by which torch itself computes weights stay."""
    for module in twin.modules():
        for hooks in (*_forward_hooks(module), module._backward_hooks, module._backward_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_foreign(hook)]:
                del hooks[key]
    return twin


def untie(twin: nn.Module, names: Iterable[str]) -> nn.Module:
    """`twin`, a copy of ours, in which the parameters of these names are nobody else's."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = twin.get_submodule(owner)
        tied = module._parameters[attribute]
        assert tied is not None
        module._parameters[attribute] = nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad)
    return twin


def _forward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    return module._forward_hooks, module._forward_pre_hooks


def _is_foreign(hook: Callable[..., Any]) -> bool:
    return not type(hook).__module__.startswith("torch.nn.utils")


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and the new node for each old one but the output."""
    copy = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, twins))
    return copy, twins
