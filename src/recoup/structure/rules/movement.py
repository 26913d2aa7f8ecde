"""Movement: operations that only put elements elsewhere are run on the labels themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recoup.structure.labels import core, varies
from recoup.structure.ledger import Ledger, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule

MOVES = (
    "permute", "transpose", "swapaxes", "t", "numpy_T", "movedim", "squeeze", "unsqueeze", "slice", "select",
    "narrow", "split", "split_with_sizes", "tensor_split", "chunk", "unsafe_chunk", "unsafe_split", "unbind", "flip",
    "roll", "flatten", "unflatten", "repeat", "tile", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "unfold",
    "repeat_interleave", "rot90", "mT", "swapdims", "diagonal", "atleast_2d", "atleast_3d",
)  # fmt: skip


@rule(*MOVES)
def move(call: Call, ledger: Ledger) -> Value:
    """Run the operation on the labels."""
    return _run(call, ledger, call.target)


RESHAPES = ("view", "reshape", "_unsafe_view", "view_as", "reshape_as")


@rule(*RESHAPES)
def reshape(call: Call, ledger: Ledger) -> Value:
    """The result's shape is known; labels are expanded views, which only `reshape` takes in every case."""
    return ledger.labels_of(call.args[0]).reshape(call.shape)


@rule("cat", "concat", "stack")
def join(call: Call, ledger: Ledger) -> Value:
    """Side by side; dims that no part changes along stay unexpanded."""
    parts = [ledger.labels_of(part) for part in call.args[0]]
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


INDEXED = ("index", "index_select", "_unsafe_index")


@rule(*INDEXED)
def index(call: Call, ledger: Ledger) -> Value:
    """By stored indices it is a movement; by computed ones it may only move along positions."""
    labels = ledger.labels_of(call.args[0])
    if call.name == "index_select":
        places: list[Any] = [None] * labels.dim()
        places[call.args[1] % labels.dim()] = call.args[2]
    else:
        places = list(call.args[1])
    if any(isinstance(place, Tensor) and varies(labels, dim) for dim, place in enumerate(places)):
        return lock_operands(call, ledger, f"{call.site} picks channels by numbers that depend on the input")
    stored = [_numbers(place) for place in places]
    return labels[tuple(slice(None) if place is None else place for place in stored)]


def _numbers(place: Value) -> Tensor | None:
    """Stored indices as they are; for computed ones zeros, as labels do not change along their dim."""
    if isinstance(place, TensorRef):
        return place.value.cpu()
    return torch.zeros(place.shape, dtype=torch.long) if isinstance(place, Tensor) else None


@rule("getitem")
def getitem(call: Call, ledger: Ledger) -> Value:  # noqa: ARG001 - every rule takes the ledger
    """One of several results."""
    return operator.getitem(call.args[0], call.args[1])


def _run(call: Call, ledger: Ledger, operation: Callable[..., Any]) -> Value:
    def labelled(value: Value) -> Value:
        if isinstance(value, (list, tuple)):
            return [labelled(item) for item in value]
        return ledger.labels_of(value) if isinstance(value, (Tensor, TensorRef)) else value

    return operation(*map(labelled, call.args), **{key: labelled(value) for key, value in call.kwargs.items()})


def _cut(labels: Tensor, dims: list[int]) -> Tensor:
    for dim in dims:
        labels = labels.narrow(dim, 0, 1)
    return labels
