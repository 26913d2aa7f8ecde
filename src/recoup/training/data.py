"""What training reads: labels of batches, and what a checkpoint remembers of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recoup.errors import CalibrationError
from recoup.inputs.batches import Stream, numbered_inputs
from recoup.inputs.labels import is_labelled, labels_in
from recoup.training.losses import class_numbers
from recoup.training.tensors import digest, plain


@dataclass(frozen=True, slots=True)
class Traces:
    """What tells batches from others: the form of the first one, and a hash of all where they lie in a list."""

    form: str
    contents: str


def labels_of(batch: Any, model: nn.Module, number: int) -> Tensor:
    """The class numbers of a training batch.

    Raises:
        CalibrationError: it has none.
    """
    if not is_labelled(batch, model):
        raise CalibrationError(
            f"training batch {number} has no labels. Give pairs (inputs, labels), or train with "
            "loss='distillation' and a teacher, which needs none."
        )
    return class_numbers(labels_in(batch, model), number)


def traces_of(batches: Iterable[Any], model: nn.Module, *, needs_labels: bool) -> Traces:
    """What a checkpoint remembers of batches.

    A loader may shuffle, so of it only dtypes and shapes of the first batch count. A list or tuple has an order.
    """
    first = _tensors_of(Stream(batches, "training").first, model, 1, needs_labels=needs_labels)
    form = ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in first.items())
    return Traces(form, _contents(batches, model, needs_labels=needs_labels))


def _contents(batches: Iterable[Any], model: nn.Module, *, needs_labels: bool) -> str:
    """A hash of all batches of a list or tuple, one after the other; nothing for what is read anew each time."""
    if type(batches) not in (list, tuple):
        return ""
    found = hashlib.sha256()
    for number, batch in enumerate(batches, start=1):
        tensors = _tensors_of(batch, model, number, needs_labels=needs_labels)
        found.update(digest("", {name: plain(value) for name, value in tensors.items()}).encode())
    return found.hexdigest()


def _tensors_of(batch: Any, model: nn.Module, number: int, *, needs_labels: bool) -> dict[str, Tensor]:
    """The tensors of a batch that training looks at, by a name for messages."""
    inputs = numbered_inputs(batch, model, number, "training").tensors()
    tensors = {f"input {place}": tensor for place, tensor in enumerate(inputs, start=1)}
    return {**tensors, "labels": labels_of(batch, model, number)} if needs_labels else tensors
