"""The activation behind a layer: what acts on its output element by element before anything else reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from recoup.graph.capture import Captured
from recoup.graph.runner import run
from recoup.operators.record import operator_of


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """A chain of operations on the value `source`, each acting on every output on its own.

    `tensors` are the parameters and buffers that they read: dotted names by the names of their nodes.
    """

    source: str = ""
    nodes: tuple[fx.Node, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)

    def bind(self, tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor] | None:
        """The chain as a function of outputs (n, N), or None for an empty chain."""
        if not self.nodes:
            return None
        stored = {node: tensors[name] for node, name in self.tensors.items()}

        def function(value: Tensor) -> Tensor:
            result: Tensor = run(self.nodes, {**stored, self.source: value}, tensors.__getitem__)[self.nodes[-1].name]
            return result

        return function


def activation_behind(captured: Captured, name: str) -> Activation:
    """The chain behind the node of that name: it ends where the value is used twice or meets another tensor."""
    node = next(n for n in captured.graph.nodes if n.name == name)
    nodes: list[fx.Node] = []
    while (user := _next(node, captured)) is not None:
        nodes.append(user)
        node = user
    read = {value.name for user in nodes for value in user.all_input_nodes}
    return Activation(name, tuple(nodes), {node: of for node, of in captured.tensors.items() if node in read})


def _next(node: fx.Node, captured: Captured) -> fx.Node | None:
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_function":
        return None
    others = [value for value in users[0].all_input_nodes if value is not node]
    is_alone = _acts_alone(users[0], node) and all(value.name in captured.tensors for value in others)
    return users[0] if is_alone else None


def _acts_alone(user: fx.Node, node: fx.Node) -> bool:
    record, made = operator_of(user.target), user.meta.get("val")
    if not isinstance(made, Tensor) or not made.is_floating_point():
        return False  # a comparison, or several results: nothing has a slope there
    if record.is_channelwise and not record.is_pointwise:
        return user.args[0] is node and _outputs_along_dim_1(node)
    is_pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ()) or record.is_channelwise
    return is_pointwise and len(user.all_input_nodes) == 1


def _outputs_along_dim_1(node: fx.Node) -> bool:
    """A batch norm acts on dim 1; behind a linear layer on more than two dims that is a position, not an output."""
    while operator_of(node.target).layer is None:
        node = node.all_input_nodes[0]
    layer = operator_of(node.target).layer
    return (layer is not None and layer.has_window) or node.meta["val"].dim() == 2
