"""What every data set looks like from outside, and the batches drawn from one whose images can be fetched by row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from recoup.cli.input_spec import InputSpec

Batch: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Images (n, channels, height, width), or such images with their labels (n,); a factory may give other forms."""


class Data(Protocol):
    """Normalised float32 batches that can be read any number of times, always the same and in the same order."""

    @property
    def name(self) -> str:
        """What to call these images in a report."""

    @property
    def labelled(self) -> bool:
        """Whether batches are pairs of images and labels."""

    @property
    def count(self) -> int:
        """How many images there are."""

    @property
    def batches(self) -> int:
        """How many batches they come in."""

    def __iter__(self) -> Iterator[Batch]: ...


class Source(Protocol):
    """Images that can be fetched by row, so that only one batch has to be decoded at a time."""

    @property
    def name(self) -> str:
        """What to call these images in a report."""

    @property
    def count(self) -> int:
        """How many images there are."""

    @property
    def labels(self) -> Tensor | None:
        """Class indices (count,), or None where there are none."""

    def images(self, rows: Tensor) -> Tensor:
        """Normalised float32 images (len(rows), channels, height, width)."""


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """Images held in memory as bytes: `pixels` (count, channels, height, width) from 0 to `maximum`."""

    name: str
    pixels: Tensor
    labels: Tensor | None
    maximum: int
    input: InputSpec

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self.pixels)

    def images(self, rows: Tensor) -> Tensor:
        """Normalised float32 images of the given rows."""
        return self.input.normalise(self.pixels[rows].float() / self.maximum)


@dataclass(frozen=True, slots=True, eq=False)
class RowBatches:
    """The images of `source` in the order of `rows`, `batch_size` at a time."""

    source: Source
    rows: Tensor
    batch_size: int

    @property
    def name(self) -> str:
        """What to call these images in a report."""
        return self.source.name

    @property
    def labelled(self) -> bool:
        """Whether batches are pairs of images and labels."""
        return self.source.labels is not None

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self.rows)

    @property
    def batches(self) -> int:
        """How many batches they come in; the last may be smaller."""
        return math.ceil(self.count / self.batch_size)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        labels = self.source.labels
        for rows in torch.split(self.rows, self.batch_size):
            images = self.source.images(rows)
            yield images if labels is None else (images, labels[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Reshuffled:
    """Whole batches of the same images in another order every time, which torch's generator decides.

    The few images that are left over wait for another epoch.
    """

    given: RowBatches

    def __len__(self) -> int:
        return max(1, self.given.count // self.given.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        whole = min(self.given.count, len(self) * self.given.batch_size)
        rows = self.given.rows[torch.randperm(self.given.count)[:whole]]
        yield from replace(self.given, rows=rows)


def reshuffled(data: Data) -> Iterable[Batch]:
    """The data in another order every time it is read; what a factory gives comes in its own order."""
    return Reshuffled(data) if isinstance(data, RowBatches) else data


def draw(source: Source, *, batch_size: int, limit: int | None, seed: int) -> RowBatches:
    """All of `source` in order, or `limit` of its images drawn without repetition under `seed`."""
    if limit is None or limit >= source.count:
        return RowBatches(source, torch.arange(source.count), batch_size)
    shuffled = torch.randperm(source.count, generator=torch.Generator().manual_seed(seed))
    return RowBatches(source, shuffled[:limit], batch_size)
