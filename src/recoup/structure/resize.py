"""The graph a smaller network runs: the captured one with every size that channels determine put right.

A value is either cut, to the rectangle that remains of it, or carried at full size with arbitrary numbers where
channels are gone, which is how it passes through shapes of which no rectangle remains. Whatever moves elements is
tried out on element numbers before it is trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from recoup.errors import VerificationError
from recoup.structure.capture import Captured
from recoup.structure.layout import Layout
from recoup.structure.operations import operation_name
from recoup.structure.rules.carrying import is_carrier, is_movement
from recoup.structure.rules.movement import INDEXED

# Where an operation keeps the size of its result.
_SIZES = {
    "view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "broadcast_to": 1, "full": 0, "zeros": 0, "ones": 0,
    "empty": 0, "new_zeros": 1, "new_ones": 1, "new_full": 1, "new_empty": 1,
}  # fmt: skip
# Where an operation keeps its number of groups of channels.
_GROUPS = {
    **{f"conv{n}d": 6 for n in (1, 2, 3)}, **{f"conv_transpose{n}d": 6 for n in (1, 2, 3)},
    "convolution": 8, "group_norm": 1,
}  # fmt: skip
# Movements that mean the same whatever the sizes are.
_SAFE = frozenset((
    "permute", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "movedim", "squeeze", "unsqueeze", "flatten",
    "cat", "concat", "stack", "view_as", "reshape_as", "getitem",
))  # fmt: skip
# Where a movement along one dim keeps that dim.
_ALONG = {"select": 1, "slice": 1, "narrow": 1, "unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2}
_SPLITS = ("split", "split_with_sizes", "tensor_split", "chunk", "unsafe_chunk", "unsafe_split")


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
    known: dict[fx.Node, _Arguments | None] = field(default_factory=dict)

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

    def _arguments_of(self, node: fx.Node) -> _Arguments | None:
        if node not in self.known:
            self.known[node] = self._arguments(node)
        return self.known[node]

    def _run_cut(self, node: fx.Node) -> fx.Node:
        arguments = self._arguments_of(node)
        assert arguments is not None
        new = self._copy(node, self._cut)
        new.target = arguments.target
        new.args = fx.node.map_arg(arguments.args, self._cut)
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

    def _arguments(self, node: fx.Node) -> _Arguments | None:
        """What the operation is called with on what remains; None for a movement that only works at full size."""
        touched = [node, *node.all_input_nodes]
        if all(self._is_whole(self.layouts[value.name]) for value in touched):
            return _Arguments(node.target, node.args, node.kwargs)
        name = operation_name(node.target)
        if name in _SIZES:
            return _with(node, _SIZES[name], "size", self._sizes(node, _SIZES[name]))
        if name == "unflatten":
            dim, given = _argument(node, 1, "dim", 0) % len(self._shape(node.args[0])), _argument(node, 2, "sizes", ())
            return _with(node, 2, "sizes", list(self._shape(node)[dim : dim + len(given)]))
        if name in ("pad", "constant_pad_nd"):
            return _with(node, 1, "pad", self._amounts(node))
        if name in _GROUPS:
            return self._groups(node, _GROUPS[name])
        if not is_movement(node) or name in _SAFE or self._is_along_another_dim(node, name):
            return _Arguments(node.target, node.args, node.kwargs)
        return next((form for form in self._forms(node, name) if self._moves_alike(node, form)), None)

    def _is_along_another_dim(self, node: fx.Node, name: str) -> bool:
        """Whether a movement works along one dim, and channels lie along another."""
        if name in INDEXED:  # by computed indices only positions are moved
            return any(self.layouts[source.name].value is None for source in node.all_input_nodes[1:])
        if name not in _ALONG:
            return False
        layout = self.layouts[node.all_input_nodes[0].name]
        dim = _argument(node, _ALONG[name], "dim", 0)
        return isinstance(layout, Layout) and layout.dim is not None and dim % len(layout.shape) != layout.dim

    def _is_whole(self, layout: Any) -> bool:
        if isinstance(layout, list):
            return all(self._is_whole(part) for part in layout)
        return layout is None or (layout.is_box and layout.kept(self.keep) is None)

    def _shape(self, node: Any) -> tuple[int, ...]:
        layout = self.layouts[node.name]
        assert isinstance(layout, Layout)
        return layout.shape_of(self.keep)

    def _sizes(self, node: fx.Node, place: int) -> list[int]:
        given = node.args[place]
        assert isinstance(given, (list, tuple))
        return [-1 if old == -1 else new for old, new in zip(given, self._shape(node), strict=True)]

    def _amounts(self, node: fx.Node) -> list[int]:
        layout, amounts = self.layouts[node.name], list(node.args[1])  # type: ignore[arg-type]  # a list of amounts
        kept = layout.kept(self.keep)
        place = 2 * (len(layout.shape) - 1 - (layout.dim or 0))
        if kept is not None and place < len(amounts):
            before, after = amounts[place : place + 2]
            amounts[place] = int((kept < before).sum())
            amounts[place + 1] = int((kept >= layout.shape[layout.dim] - after).sum())
        return amounts

    def _groups(self, node: fx.Node, place: int) -> _Arguments:
        groups, source = _argument(node, place, "groups", 1), _argument(node, 0, "input", None)
        before, after = self.layouts[source.name], self._shape(source)
        if groups == 1 or before.dim is None:
            return _Arguments(node.target, node.args, node.kwargs)
        return _with(node, place, "groups", groups * after[before.dim] // before.shape[before.dim])

    def _forms(self, node: fx.Node, name: str) -> Iterator[_Arguments]:
        """Ways to call a movement on what remains, the most faithful first."""
        yield _Arguments(node.target, node.args, node.kwargs)
        layout, outputs = self.layouts[node.all_input_nodes[0].name], self.layouts[node.name]
        if name in _SPLITS:
            dim = _argument(node, 2, "dim", 0) % len(layout.shape)
            sizes = [part.shape_of(self.keep)[dim] for part in outputs]
            yield _Arguments(torch.ops.aten.split_with_sizes.default, (node.args[0], sizes, dim), {})
        kept = layout.kept(self.keep)
        if name == "slice" and kept is not None:
            dim = _argument(node, 1, "dim", 0) % len(layout.shape)
            start = int((kept < _bound(_argument(node, 2, "start", 0) or 0, layout.shape[dim])).sum())
            end = start + outputs.shape_of(self.keep)[dim]
            yield _Arguments(node.target, (node.args[0], dim, start, end), {})
        if name == "narrow" and kept is not None:
            dim = _argument(node, 1, "dim", 0) % len(layout.shape)
            start = int((kept < _bound(_argument(node, 2, "start", 0), layout.shape[dim])).sum())
            yield _Arguments(node.target, (node.args[0], dim, start, outputs.shape_of(self.keep)[dim]), {})
        if name == "select" and kept is not None:
            dim = _argument(node, 1, "dim", 0) % len(layout.shape)
            place = int((kept < _bound(_argument(node, 2, "index", 0), layout.shape[dim])).sum())
            yield _Arguments(node.target, (node.args[0], dim, place), {})

    def _moves_alike(self, node: fx.Node, form: _Arguments) -> bool:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Arguments:
    """How to call an operation, in terms of the old graph's nodes."""

    target: Any
    args: Any
    kwargs: Any


def _is_box(layout: Any) -> bool:
    if isinstance(layout, list):
        return all(_is_box(part) for part in layout)
    return layout is None or layout.is_box


def _with(node: fx.Node, place: int, name: str, value: Any) -> _Arguments:
    if len(node.args) > place:
        return _Arguments(node.target, (*node.args[:place], value, *node.args[place + 1 :]), node.kwargs)
    return _Arguments(node.target, node.args, {**node.kwargs, name: value})


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _bound(index: Any, size: int) -> int:
    return int(index + size if index < 0 else min(index, size))


def _call(target: Any, args: Any, kwargs: Any, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((args, kwargs), values.__getitem__)
    return target(*args, **kwargs)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return torch.equal(left, right)
