"""What happens to a layer's output element by element before anything else reads it: g in the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from recoup.structure.capture import Captured
from recoup.structure.operations import operation_name

Step: TypeAlias = tuple[Any, tuple[Any, ...], Mapping[str, Any]]

_NORMS = ("batch_norm",)
_LAYERS = (*(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)), "convolution")


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for the value handed from step to step."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stands for a parameter or buffer of the model."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """A chain of operations, each acting on every output on its own: batch norm in eval mode, activations."""

    steps: tuple[Step, ...] = ()

    def bind(self, tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor] | None:
        """The chain as a function of outputs (n, N), or None for an empty chain."""
        if not self.steps:
            return None

        def function(value: Tensor) -> Tensor:
            for target, args, kwargs in self.steps:
                filled = [_fill(argument, value, tensors) for argument in args]
                value = target(*filled, **{key: _fill(item, value, tensors) for key, item in kwargs.items()})
            return value

        return function


def following(captured: Captured, node_name: str) -> Following:
    """The chain behind the node of that name: it ends where the value is used twice or meets another tensor."""
    node = next(n for n in captured.graph.nodes if n.name == node_name)
    steps = []
    while (found := _next_step(node, captured)) is not None:
        node, entry = found
        steps.append(entry)
    return Following(tuple(steps))


def step(user: fx.Node, node: fx.Node, stored: Mapping[str, str]) -> Step:
    """One operation of a chain: `user` acting on the value of `node`, and on `stored` tensors {node: tensor}."""

    def stand_in(value: fx.Node) -> Any:
        return _Output() if value is node else _Stored(stored[value.name])

    args, kwargs = fx.node.map_arg(user.args, stand_in), fx.node.map_arg(user.kwargs, stand_in)
    return user.target, tuple(args), dict(kwargs)


def _next_step(node: fx.Node, captured: Captured) -> tuple[fx.Node, Step] | None:
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_function":
        return None
    user = users[0]
    others = [value for value in user.all_input_nodes if value is not node]
    if not _acts_alone(user, node) or any(value.name not in captured.tensors for value in others):
        return None
    return user, step(user, node, captured.tensors)


def _acts_alone(user: fx.Node, node: fx.Node) -> bool:
    if operation_name(user.target) in _NORMS:
        return user.args[0] is node and _outputs_along_dim_1(node)
    is_pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
    return (is_pointwise or operation_name(user.target) in ("hardswish", "dropout")) and len(user.all_input_nodes) == 1


def _outputs_along_dim_1(node: fx.Node) -> bool:
    """A batch norm acts on dim 1; behind a linear layer on more than two dims that is a position, not an output."""
    while operation_name(node.target) not in (*_LAYERS, "linear"):
        node = node.all_input_nodes[0]
    return operation_name(node.target) in _LAYERS or node.meta["val"].dim() == 2


def _fill(argument: Any, value: Tensor, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(argument, _Output):
        return value
    return tensors[argument.name] if isinstance(argument, _Stored) else argument
