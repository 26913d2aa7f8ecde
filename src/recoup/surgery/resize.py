"""The graph a smaller network runs: the captured one with every size that channels determine put right.

A value is either cut, to the rectangle that remains of it, or carried at full size with arbitrary numbers where
channels are gone, which is how it passes through shapes of which no rectangle remains. Whatever moves elements is
tried out on element numbers before it is trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from recoup.errors import VerificationError
from recoup.graph.capture import Captured
from recoup.labels.layout import Layout
from recoup.operators.record import is_carrier, is_movement, operator_of
from recoup.operators.resizing import CallArguments, unchanged


@dataclass(frozen=True, slots=True, eq=False)
class Resized:
    """The graph for the kept channels, the index tensors it uses, and whether no operation had to be added."""

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    is_plain: bool


def resize(captured: Captured, layouts: Mapping[str, Any], keep: Tensor) -> Resized:
    """The graph of the network that keeps `keep` (a mask over all channels), for a batch of one.

    Raises:
        VerificationError: an operation would have to work on what is no rectangle.
    """
    work = _Resizer(captured, layouts, keep)
    for node in captured.graph.nodes:
        work.add(node)
    return Resized(work.graph, work.constants, not work.constants)


@dataclass(slots=True)
class _Value:
    """A node of the new graph, and whether it is still at full size."""

    node: fx.Node
    is_full: bool = False


@dataclass(slots=True, eq=False)
class _Resizer:
    captured: Captured
    layouts: Mapping[str, Any]
    keep: Tensor
    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    values: dict[fx.Node, _Value] = field(default_factory=dict)
    known: dict[fx.Node, CallArguments | None] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph.output(fx.node.map_arg(node.args[0], self._cut))
        elif node.op != "call_function":
            self.values[node] = _Value(self._copy(node, self._cut))
        elif is_carrier(node) and self._must_be_full(node):
            self.values[node] = self._run_full(node)
        else:
            self.values[node] = _Value(self._run_cut(node))

    def _must_be_full(self, node: fx.Node) -> bool:
        inputs = [self.values[source] for source in node.all_input_nodes]
        if any(value.is_full for value in inputs) or not _is_box(self.layouts[node.name]):
            return True
        return is_movement(node) and self._arguments_of(node) is None

    def _arguments_of(self, node: fx.Node) -> CallArguments | None:
        if node not in self.known:
            self.known[node] = self._arguments(node)
        return self.known[node]

    def _run_cut(self, node: fx.Node) -> fx.Node:
        arguments = self._arguments_of(node)
        assert arguments is not None
        new = self._copy(node, self._cut)
        new.target = arguments.target
        args = _inferred_again(node.args, arguments.args) if node.target is arguments.target else arguments.args
        new.args = fx.node.map_arg(args, self._cut)
        new.kwargs = fx.node.map_arg(arguments.kwargs, self._cut)
        return new

    def _run_full(self, node: fx.Node) -> _Value:
        new = self._copy(node, self._full)
        layout = self.layouts[node.name]
        if isinstance(layout, Layout) and layout.is_box:
            kept = layout.kept(self.keep)
            return _Value(new if kept is None else self._select(new, layout, kept))
        return _Value(new, is_full=True)

    def _copy(self, node: fx.Node, change: Callable[[fx.Node], fx.Node]) -> fx.Node:
        new = self.graph.node_copy(node, change)
        new.meta["origin"] = node.name  # its own name may have to give way to a node put in before it
        return new

    def _cut(self, node: fx.Node) -> fx.Node:
        value = self.values[node]
        if value.is_full:
            raise VerificationError(f"{node.name} works on channels that do not remain rectangular; please report it.")
        return value.node

    def _full(self, node: fx.Node) -> fx.Node:
        """The value at full size: rows that are gone are filled with the first that is left."""
        value, layout = self.values[node], self.layouts[node.name]
        if value.is_full or not isinstance(layout, Layout):
            return value.node
        kept = layout.kept(self.keep)
        if kept is None or layout.dim is None:
            return value.node
        fill = torch.zeros(layout.shape[layout.dim], dtype=torch.long)
        fill[kept] = torch.arange(len(kept))
        return self._select(value.node, layout, fill)

    def _select(self, node: fx.Node, layout: Layout, index: Tensor) -> fx.Node:
        taken = {*self.captured.tensors.values(), *self.constants}  # a standalone model that is cut again has some
        name = next(n for n in (f"recoup_indices.at_{k}" for k in itertools.count()) if n not in taken)
        self.constants[name] = index
        place = self.graph.get_attr(name)
        return self.graph.call_function(torch.ops.aten.index_select.default, (node, layout.dim, place))

    def _arguments(self, node: fx.Node) -> CallArguments | None:
        """What the operation is called with on what remains; None for a movement that only works at full size."""
        touched = [node, *node.all_input_nodes]
        if all(self._is_whole(self.layouts[value.name]) for value in touched):
            return unchanged(node, self)
        return operator_of(node.target).resize(node, self)

    def layout(self, node: fx.Node, /) -> Any:
        return self.layouts[node.name]

    def shape(self, node: fx.Node, /) -> tuple[int, ...]:
        layout = self.layouts[node.name]
        assert isinstance(layout, Layout)
        return self.shape_of(layout)

    def shape_of(self, layout: Layout, /) -> tuple[int, ...]:
        return layout.shape_of(self.keep)

    def kept(self, layout: Layout, /) -> Tensor | None:
        return layout.kept(self.keep)

    def _is_whole(self, layout: Any) -> bool:
        if isinstance(layout, list):
            return all(self._is_whole(part) for part in layout)
        return layout is None or (layout.is_box and layout.kept(self.keep) is None)

    def moves_alike(self, node: fx.Node, form: CallArguments, /) -> bool:
        """Whether `form`, run on the element numbers that remain, gives the ones that remain of the full result."""
        whole = {source: self._element_numbers(source) for source in node.all_input_nodes}
        parts = {source: self._remaining(value, self.layouts[source.name]) for source, value in whole.items()}
        expected = self._remaining(_call(node.target, node.args, node.kwargs, whole), self.layouts[node.name])
        try:
            return _equal(_call(form.target, form.args, form.kwargs, parts), expected)
        except (RuntimeError, IndexError, ValueError):  # the sizes do not fit
            return False

    def _element_numbers(self, node: fx.Node) -> Any:
        layout = self.layouts[node.name]
        if isinstance(layout, Layout) and layout.value is not None:
            return layout.value
        if isinstance(layout, list):
            return [torch.arange(part.shape.numel()).view(part.shape) for part in layout]
        return torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)

    def _remaining(self, value: Any, layout: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._remaining(part, own) for part, own in zip(value, layout, strict=True)]
        kept = layout.kept(self.keep)
        return value if kept is None else value.index_select(layout.dim, kept)


def _inferred_again(old: Any, new: Any) -> Any:
    """New arguments in which a size that was left to be inferred (-1) still is: so it follows inputs of any size."""
    if not isinstance(old, (list, tuple)) or not isinstance(new, (list, tuple)) or len(old) != len(new):
        return new
    parts = (
        -1 if isinstance(old, list) and a == -1 and type(b) is int else _inferred_again(a, b)
        for a, b in zip(old, new, strict=True)
    )
    return type(new)(parts) if isinstance(new, tuple) else list(parts)


def _is_box(layout: Any) -> bool:
    if isinstance(layout, list):
        return all(_is_box(part) for part in layout)
    return layout is None or layout.is_box


def _call(target: Any, args: Any, kwargs: Any, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((args, kwargs), values.__getitem__)
    return target(*args, **kwargs)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return torch.equal(left, right)
