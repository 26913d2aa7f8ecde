"""What training returns: the network, and what was seen on the way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: mean loss, learning rate of its last step, seconds of its steps, and accuracy where it was measured.

    The accuracy is that on the validation batches, in points. It decides nothing.
    """

    loss: float
    rate: float
    seconds: float
    accuracy: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Finetuned:
    """A trained copy of a model, in eval mode, and every epoch of its training."""

    model: nn.Module
    history: tuple[Epoch, ...]
