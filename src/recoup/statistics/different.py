"""How many of the samples differ: a thousand copies of one image tell no more than that image."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.inputs.batches import Inputs

# Digits by which samples are told apart: more than float32 has, fewer than two orders of summation agree in.
DIGITS = 10


class DifferentSamples:
    """Counts samples that differ, up to `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._marks: set[str] = set()

    @property
    def count(self) -> int:
        """How many there were so far."""
        return min(len(self._marks), self._most)

    def see(self, inputs: Inputs) -> None:
        """Take note of the samples of a batch; once there are enough, nothing is done."""
        if self.count < self._most:
            columns = [_marks(tensor) for tensor in inputs.tensors() if tensor.dim() and len(tensor) == inputs.size]
            self._marks |= {" ".join(marks) for marks in zip(*columns, strict=True)} or {""}


def _marks(tensor: Tensor) -> list[str]:
    """A number for each sample, as text: its product with a vector that favours no place."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = values.detach().reshape(len(values), -1).double()
    places = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [f"{mark:.{DIGITS}g}" for mark in (rows @ places.to(rows.device)).tolist()]
