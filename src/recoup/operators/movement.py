"""Movement: operations that only put elements elsewhere are run on the labels themselves."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from recoup.labels.arrays import core, varies
from recoup.labels.constraints import Constraints, TensorRef
from recoup.labels.layout import Layout
from recoup.operators.call import LabelCall, Value, lock_operands
from recoup.operators.differential import Differential, RecordedCall, linear_in_first, reshaped
from recoup.operators.names import argument, operation_name
from recoup.operators.record import operator
from recoup.operators.resizing import (
    CallArguments,
    Remaining,
    bounded,
    size_at,
    tried_out,
    unchanged,
    with_argument,
)


def move(call: LabelCall, constraints: Constraints) -> Value:
    """Run the operation on the labels."""
    return _run(call, constraints, call.target)


# Whatever the sizes are, these mean the same.
operator("permute", "transpose", is_movement=True, differential=linear_in_first)(move)
operator("flatten", "squeeze", "unsqueeze", is_movement=True, differential=reshaped)(move)
operator("swapaxes", "swapdims", "t", "numpy_T", "mT", "movedim", is_movement=True)(move)
# What these do with other sizes is tried out.
operator(
    "flip", "roll", "repeat", "tile", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "unfold",
    "repeat_interleave", "rot90", "diagonal", "atleast_2d", "atleast_3d", is_movement=True, resize=tried_out(),
)(move)  # fmt: skip
operator("unbind", is_movement=True, resize=tried_out(along=1))(move)


def _parts(node: fx.Node, remaining: Remaining) -> Iterator[CallArguments]:
    """Pieces of the sizes that remain."""
    dim = _dim(node, 2, remaining)
    sizes = [remaining.shape_of(part)[dim] for part in remaining.layout(node)]
    if operation_name(node.target) == "split" and len(set(sizes)) == 1:  # as the code itself would ask for them
        yield with_argument(node, 1, "split_size", sizes[0])
    yield CallArguments(torch.ops.aten.split_with_sizes.default, (node.args[0], sizes, dim), {})


@operator("split", "split_with_sizes", "chunk", is_movement=True, resize=tried_out(_parts, along=2))
def divide(call: LabelCall, constraints: Constraints) -> Value:
    """Run it on the labels; code whose numbers stay goes on making pieces of equal size."""
    pieces = move(call, constraints)
    if constraints.sizes_stay:
        constraints.cut_evenly(pieces, call.argument(2, "dim", 0))
    return pieces


operator("tensor_split", "unsafe_chunk", "unsafe_split", is_movement=True, resize=tried_out(_parts))(move)


def _sliced(node: fx.Node, remaining: Remaining) -> Iterator[CallArguments]:
    end: Any = argument(node, 3, "end", None)
    for dim, start, size in _range(node, remaining):
        is_open = type(end) is not int or end >= remaining.layout(node.all_input_nodes[0]).shape[dim]
        yield CallArguments(node.target, (node.args[0], dim, start, end if is_open else start + size), {})


def _narrowed(node: fx.Node, remaining: Remaining) -> Iterator[CallArguments]:
    for dim, start, size in _range(node, remaining):
        yield CallArguments(node.target, (node.args[0], dim, start, size), {})


def _selected(node: fx.Node, remaining: Remaining) -> Iterator[CallArguments]:
    layout = remaining.layout(node.all_input_nodes[0])
    if (kept := remaining.kept(layout)) is not None:
        dim = _dim(node, 1, remaining)
        place = int((kept < bounded(argument(node, 2, "index", 0), layout.shape[dim])).sum())
        yield CallArguments(node.target, (node.args[0], dim, place), {})


def _range(node: fx.Node, remaining: Remaining) -> Iterator[tuple[int, int, int]]:
    """Along which dim, from where and how many indices of what remains are taken; nothing where all remains."""
    layout = remaining.layout(node.all_input_nodes[0])
    if (kept := remaining.kept(layout)) is not None:
        dim = _dim(node, 1, remaining)
        start = int((kept < bounded(argument(node, 2, "start", 0) or 0, layout.shape[dim])).sum())
        yield dim, start, remaining.shape(node)[dim]


operator("slice", is_movement=True, resize=tried_out(_sliced, along=1), differential=linear_in_first)(move)
operator("select", is_movement=True, resize=tried_out(_selected, along=1), differential=linear_in_first)(move)
operator("narrow", is_movement=True, resize=tried_out(_narrowed, along=1))(move)


def _scattered(node: fx.Node, remaining: Remaining) -> Iterator[CallArguments]:
    """What is put in begins where what is left of the target does, and is as long as what remains of it."""
    target, source = remaining.layout(node), remaining.layout(node.all_input_nodes[-1])
    if (kept := remaining.kept(target)) is not None:
        dim = argument(node, 2, "dim", 0) % len(target.shape)
        start = int((kept < bounded(argument(node, 3, "start", 0) or 0, target.shape[dim])).sum())
        end = start + remaining.shape_of(source)[dim]
        yield CallArguments(node.target, (*node.args[:2], dim, start, end), {})


def _scattered_at(node: fx.Node, remaining: Remaining) -> Iterator[CallArguments]:
    target = remaining.layout(node)
    if (kept := remaining.kept(target)) is not None:
        dim = argument(node, 2, "dim", 0) % len(target.shape)
        place = int((kept < bounded(argument(node, 3, "index", 0), target.shape[dim])).sum())
        yield CallArguments(node.target, (*node.args[:2], dim, place), {})


operator("slice_scatter", is_movement=True, resize=tried_out(_scattered))(move)
operator("select_scatter", is_movement=True, resize=tried_out(_scattered_at))(move)


def _unflattened(node: fx.Node, remaining: Remaining) -> CallArguments:
    dim, given = _dim(node, 1, remaining), argument(node, 2, "sizes", ())
    return with_argument(node, 2, "sizes", list(remaining.shape(node)[dim : dim + len(given)]))


operator("unflatten", is_movement=True, resize=_unflattened, differential=reshaped)(move)


def reshape(call: LabelCall, constraints: Constraints) -> Value:
    """The result's shape is known; labels are expanded views, which only `reshape` takes in every case."""
    return constraints.labels_of(call.args[0]).reshape(call.shape)


operator("view", "reshape", is_movement=True, resize=size_at(1), differential=reshaped)(reshape)
operator("_unsafe_view", is_movement=True, resize=size_at(1))(reshape)
operator("view_as", "reshape_as", is_movement=True)(reshape)


def _joined(call: RecordedCall) -> Differential | None:
    target, (values, *others), names = call.target, call.operands, call.names
    if names:
        return None
    nothing = [value.new_zeros(()).expand(value.shape) for value in values]

    def push(moves: Sequence[Any]) -> Any:
        return target([zero if move is None else move for zero, move in zip(nothing, moves[0], strict=True)], *others)

    return push


def join(call: LabelCall, constraints: Constraints) -> Value:
    """Side by side; dims that no part changes along stay unexpanded."""
    parts = [constraints.labels_of(part) for part in call.args[0]]
    dim = call.argument(1, "dim", 0)
    if call.name == "stack":
        dim = dim % (parts[0].dim() + 1)
        parts = [part.unsqueeze(dim) for part in parts]
    dim %= parts[0].dim()
    parts = [part for part in parts if part.numel()]
    small = [core(part.movedim(dim, 0)[0]) for part in parts]
    shared = [d for d in range(parts[0].dim() - 1) if all(s[0].shape[d] == 1 for s in small)]
    cut = [_cut(part.movedim(dim, 0), [d + 1 for d in shared]) for part in parts]
    return torch.cat(cut).movedim(0, dim).expand(call.shape)


operator("cat", is_movement=True, differential=_joined)(join)
operator("concat", "stack", is_movement=True)(join)


def _indexed(node: fx.Node, remaining: Remaining) -> CallArguments | None:
    """By computed indices only positions are moved; stored ones are tried out."""
    if any(remaining.layout(source).value is None for source in node.all_input_nodes[1:]):
        return unchanged(node, remaining)
    return tried_out()(node, remaining)


@operator("index", "index_select", "_unsafe_index", is_movement=True, resize=_indexed)
def index(call: LabelCall, constraints: Constraints) -> Value:
    """By stored indices it is a movement; by computed ones it may only move along positions."""
    labels = constraints.labels_of(call.args[0])
    if call.name == "index_select":
        places: list[Any] = [None] * labels.dim()
        places[call.args[1] % labels.dim()] = call.args[2]
    else:
        places = list(call.args[1])
    if any(isinstance(place, Tensor) and varies(labels, dim) for dim, place in enumerate(places)):
        return lock_operands(call, constraints, f"{call.site} picks channels by numbers that depend on the input")
    stored = [_numbers(place) for place in places]
    return labels[tuple(slice(None) if place is None else place for place in stored)]


def _numbers(place: Value) -> Tensor | None:
    """Stored indices as they are; for computed ones zeros, as labels do not change along their dim."""
    if isinstance(place, TensorRef):
        return place.value.cpu()
    return torch.zeros(place.shape, dtype=torch.long) if isinstance(place, Tensor) else None


def _item(call: RecordedCall) -> Differential:
    place = call.operands[1]
    return lambda moves: moves[0][place]


@operator("getitem", is_movement=True, differential=_item)
def getitem(call: LabelCall, constraints: Constraints) -> Value:  # noqa: ARG001 - every rule takes the constraints
    """One of several results."""
    return python.getitem(call.args[0], call.args[1])


def _run(call: LabelCall, constraints: Constraints, operation: Callable[..., Any]) -> Value:
    def labelled(value: Value) -> Value:
        if isinstance(value, (list, tuple)):
            return [labelled(item) for item in value]
        return constraints.labels_of(value) if isinstance(value, (Tensor, TensorRef)) else value

    return operation(*map(labelled, call.args), **{key: labelled(value) for key, value in call.kwargs.items()})


def _cut(labels: Tensor, dims: list[int]) -> Tensor:
    for dim in dims:
        labels = labels.narrow(dim, 0, 1)
    return labels


def _dim(node: fx.Node, place: int, remaining: Remaining) -> int:
    """The dim that a movement works along, counted from the front."""
    layout = remaining.layout(node.all_input_nodes[0])
    assert isinstance(layout, Layout)
    return int(argument(node, place, "dim", 0) % len(layout.shape))
