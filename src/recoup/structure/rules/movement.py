"""Movement: operations that only put elements elsewhere are run on the labels themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recoup.structure.labels import FIXED, compress, core, varies
from recoup.structure.ledger import Ledger, TensorRef
from recoup.structure.rules.table import Call, Value, lock_operands, rule

MOVES = (
    "permute", "transpose", "swapaxes", "t", "numpy_T", "movedim", "squeeze", "unsqueeze", "expand", "slice", "select",
    "narrow", "split", "split_with_sizes", "tensor_split", "chunk", "unsafe_chunk", "unsafe_split", "unbind", "flip",
    "roll", "flatten", "unflatten", "repeat", "tile", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
)  # fmt: skip


@rule(*MOVES)
def move(call: Call, ledger: Ledger) -> Value:
    """Run the operation on the labels."""
    return _run(call, ledger, call.target)


@rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as")
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


@rule("pad", "constant_pad_nd")
def pad(call: Call, ledger: Ledger) -> Value:
    """A border around positions belongs to its channel; zeros beside channels are put there by the code, and stay."""
    labels, amounts = compress(ledger.labels_of(call.args[0])), call.args[1]
    zeros = call.name == "constant_pad_nd" or call.argument(2, "mode", "constant") == "constant"
    for i in range(len(amounts) // 2):
        dim, before, after = labels.dim() - 1 - i, amounts[2 * i], amounts[2 * i + 1]
        if not before and not after:
            continue
        if not varies(labels, dim):
            size = list(labels.shape)
            size[dim] += before + after
            labels = labels.narrow(dim, 0, 1).expand(size)
        elif zeros:
            labels = torch.nn.functional.pad(labels, [0, 0] * i + [before, after], value=FIXED)
        else:
            return lock_operands(call, ledger, f"{call.site} repeats channels")
    return labels


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
