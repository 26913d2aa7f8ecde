"""Batches that the user's own code provides, passed on as they are: no normalisation, no reordering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from recoup.cli.importing import call_factory
from recoup.errors import DataError


@dataclass(frozen=True, eq=False)  # no slots: counts are cached in the instance
class ImportedBatches:
    """The batches of `iterable`, at most `limit` samples of them."""

    name: str
    iterable: Iterable[Any]
    labelled: bool
    limit: int | None

    @cached_property
    def count(self) -> int:
        """How many samples there are; the first look goes through all batches."""
        return sum(_size(batch, self.name) for batch in self)

    @cached_property
    def batches(self) -> int:
        """How many batches they come in; the first look may go through all of them."""
        if self.limit is None and isinstance(self.iterable, Sized):
            return len(self.iterable)
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Any]:
        if self.limit is None:
            yield from self.iterable
            return
        left = self.limit
        for batch in self.iterable:
            size = _size(batch, self.name)
            yield batch if size <= left else _first(batch, size, left)
            left -= size
            if left <= 0:
                return


def open_imported(spec: str, limit: int | None) -> ImportedBatches:
    """The batches returned by the factory that `spec` names; a `limit` takes the first samples, in their order.

    They count as labelled when the first of them is a pair.

    Raises:
        DataError: what it returns is empty, can be read only once, or is a single batch.
    """
    content = call_factory(spec, DataError)
    if not isinstance(content, Iterable) or isinstance(content, (Tensor, Mapping, str)):
        raise DataError(f"'{spec}' returned a {type(content).__name__}. Return a list of batches or a DataLoader.")
    if isinstance(content, Iterator):
        raise DataError(
            f"'{spec}' returned a {type(content).__name__}, which can be read only once, but the batches are needed "
            "again. Return a list of batches or a DataLoader."
        )
    for first in content:
        _size(first, spec)
        return ImportedBatches(spec, content, isinstance(first, (tuple, list)) and len(first) == 2, limit)
    raise DataError(f"'{spec}' returned no batches. Check that the data it reads is there.")


def _size(batch: Any, name: str) -> int:
    """How many samples a batch has: the first dimension of its first tensor."""
    for tensor in _tensors(batch):
        if tensor.dim() > 0:
            return len(tensor)
    raise DataError(
        f"'{name}' gave a batch of type {type(batch).__name__} without a tensor of samples in it. Make every batch a "
        "tensor of images or a pair of images and labels."
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _tensors(part)


def _first(batch: Any, size: int, count: int) -> Any:
    """The first `count` of the `size` samples of a batch, whatever its parts are nested in."""
    if isinstance(batch, Tensor):
        return batch[:count] if batch.dim() > 0 and len(batch) == size else batch
    if isinstance(batch, Mapping):
        return {key: _first(part, size, count) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_first(part, size, count) for part in batch)
    return batch
