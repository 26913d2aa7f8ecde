"""One call of a model for any number of samples: which of its tensors hold samples, and the first of them repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recoup.inputs.batches import Inputs


@dataclass(frozen=True, slots=True, eq=False)
class SampledCall:
    """A call for `one` sample, taken from a batch of `given`.

    `batched` says for every tensor of the call, in the order of `Inputs.map`, whether its first dim counts samples.
    """

    one: Inputs
    batched: tuple[bool, ...]
    given: int

    def to(self, device: torch.device) -> SampledCall:
        """The same with copies of the sample's tensors on `device`."""
        return replace(self, one=self.one.to(device))

    def times(self, count: int) -> Inputs:
        """The call for so many samples."""
        which = iter(self.batched)
        return self.one.map(lambda tensor: torch.cat([tensor] * count) if next(which) else tensor.clone())

    def batched_in(self, call: Inputs) -> list[Tensor]:
        """The tensors of a call of this form that hold samples."""
        return [tensor for tensor, holds in zip(_in_order(call), self.batched, strict=True) if holds]


def sampled_call(inputs: Inputs) -> SampledCall:
    """The first sample of a batch, and where samples are."""
    size = inputs.size
    batched = tuple(tensor.dim() > 0 and tensor.shape[0] == size for tensor in _in_order(inputs))
    return SampledCall(inputs.first(1), batched, size)


def _in_order(inputs: Inputs) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    inputs.map(note)
    return found
