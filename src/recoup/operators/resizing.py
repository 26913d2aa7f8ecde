"""How an operator is called once channels are gone: in terms of the old graph's nodes, with other numbers.

A resize rule gets the node and what remains of the values around it. It answers with the arguments for what remains,
or with None where the operation only works at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias

from torch import Tensor, fx

from recoup.labels.layout import Layout
from recoup.operators.names import argument


@dataclass(frozen=True, slots=True, eq=False)
class CallArguments:
    """How to call an operation, in terms of the old graph's nodes."""

    target: Any
    args: Any
    kwargs: Any


class Remaining(Protocol):
    """What remains of the values in a graph."""

    def layout(self, node: fx.Node, /) -> Any:
        """Where the channels of a value lie; a list for several values, None for what is no tensor."""
        ...

    def shape(self, node: fx.Node, /) -> tuple[int, ...]:
        """The shape of what remains of a value."""
        ...

    def shape_of(self, layout: Layout, /) -> tuple[int, ...]:
        """The shape of what remains of a value with that layout."""
        ...

    def kept(self, layout: Layout, /) -> Any:
        """Indices that remain along the dim of the channels, or None if all do."""
        ...

    def moves_alike(self, node: fx.Node, form: CallArguments, /) -> bool:
        """Whether a form of the call, run on the element numbers that remain, gives those that remain of the result."""
        ...


Resize: TypeAlias = Callable[[fx.Node, Remaining], CallArguments | None]
Forms: TypeAlias = Callable[[fx.Node, Remaining], Iterator[CallArguments]]


def unchanged(node: fx.Node, _: Remaining) -> CallArguments:
    """As before: nothing in the call depends on the number of channels."""
    return CallArguments(node.target, node.args, node.kwargs)


def with_argument(node: fx.Node, place: int, name: str, value: Any) -> CallArguments:
    """As before but for one argument."""
    if len(node.args) > place:
        return CallArguments(node.target, (*node.args[:place], value, *node.args[place + 1 :]), node.kwargs)
    return CallArguments(node.target, node.args, {**node.kwargs, name: value})


def size_at(place: int) -> Resize:
    """The size of the result stands among the arguments."""

    def resize(node: fx.Node, remaining: Remaining) -> CallArguments:
        given: Any = node.args[place]
        sizes = [-1 if old == -1 else new for old, new in zip(given, remaining.shape(node), strict=True)]
        return with_argument(node, place, "size", sizes)

    return resize


def groups_at(place: int) -> Resize:
    """The number of groups stands among the arguments; those that have lost all of their inputs are gone."""

    def resize(node: fx.Node, remaining: Remaining) -> CallArguments:
        groups, source = argument(node, place, "groups", 1), argument(node, 0, "input")
        layout = remaining.layout(source)
        kept = remaining.kept(layout)
        if groups == 1 or kept is None:
            return unchanged(node, remaining)
        return with_argument(node, place, "groups", parts_left(kept, layout.shape[layout.dim], groups))

    return resize


def parts_left(kept: Tensor, size: int, parts: int) -> int:
    """Of `parts` equal runs of `size` indices, how many have some that are `kept`."""
    return len((kept // (size // parts)).unique())


def tried_out(forms: Forms | None = None, along: int | None = None) -> Resize:
    """A movement of elements: the first form of the call that moves what remains as the whole was moved.

    `along` is the place of the dim that it works along; where channels lie along another one, it stays as it is.
    """

    def resize(node: fx.Node, remaining: Remaining) -> CallArguments | None:
        same = unchanged(node, remaining)
        if along is not None and _is_along_another_dim(node, along, remaining):
            return same
        others = () if forms is None else forms(node, remaining)
        return next((form for form in chain([same], others) if remaining.moves_alike(node, form)), None)

    return resize


def bounded(index: Any, size: int) -> int:
    """An index or the end of a slice, counted from the front and within the size."""
    return int(index + size if index < 0 else min(index, size))


def _is_along_another_dim(node: fx.Node, place: int, remaining: Remaining) -> bool:
    layout = remaining.layout(node.all_input_nodes[0])
    if not isinstance(layout, Layout) or layout.dim is None:
        return False
    return bool(argument(node, place, "dim", 0) % len(layout.shape) != layout.dim)
