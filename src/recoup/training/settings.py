"""How to train: a frozen value with its checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from recoup.config import SEEDS, is_number, require_at_least, require_one_of, require_whole
from recoup.errors import UsageError, shown
from recoup.inputs.augment import Augment

Optimiser = Literal["sgd", "adamw"]
Loss = Literal["labels", "distillation", "both"]
Precision = Literal["float32", "bfloat16"]

# The highest learning rate of a network that was trained before, where none is given.
RATES = MappingProxyType({"sgd": 0.01, "adamw": 0.001})
# Fields that are kept as Python's own floats, which can be written to a file.
_NUMBERS = ("rate", "momentum", "decay", "warm_up", "smoothing", "temperature")


@dataclass(frozen=True, slots=True)
class Training:
    """How to train; the learning rate rises in a line and falls along a cosine.

    epochs: how often the batches are read.
    optimiser: "sgd" with Nesterov momentum, or "adamw".
    rate: the highest learning rate; None takes 0.01 for sgd and 0.001 for adamw.
    momentum: of the gradient; for adamw the first of its two averages.
    decay: weight decay, of matrices and kernels only.
    warm_up: the share of the steps over which the rate rises.
    smoothing: the share of a label that is spread over all classes.
    loss: "labels" is cross-entropy, "distillation" the divergence from a teacher's answers, "both" their mean.
    temperature: that scores are divided by before they are compared with the teacher's.
    precision: "bfloat16" multiplies in that, and keeps weights as they are.
    augment: what happens to images: "none", "flip" every second one, or "crop": shift by up to 1/8 and flip.
    seed: random seed of every epoch, for dropout, images and order.
    """

    epochs: int = 10
    optimiser: Optimiser = "sgd"
    rate: float | None = None
    momentum: float = 0.9
    decay: float = 5e-4
    warm_up: float = 0.05
    smoothing: float = 0.0
    loss: Loss = "labels"
    temperature: float = 2.0
    precision: Precision = "float32"
    augment: Augment = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "seed"):
            require_whole(name, getattr(self, name), least=0)
            if getattr(self, name) >= SEEDS:
                raise UsageError(f"{name} must be below 2 to the power of 63, got {shown(getattr(self, name))}.")
        for name, kind in (("optimiser", Optimiser), ("loss", Loss), ("precision", Precision), ("augment", Augment)):
            require_one_of(name, getattr(self, name), get_args(kind))
        for name in _NUMBERS:
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        require_at_least("decay", self.decay, 0)
        for name in ("momentum", "warm_up", "smoothing"):
            if not is_number(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must lie from 0 to below 1, got {getattr(self, name)}.")
        for name, value in (("rate", self.peak), ("temperature", self.temperature)):
            if not is_number(value) or not 0 < value < math.inf:
                raise UsageError(f"{name} must be a number above 0, got {value}.")

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        return RATES[self.optimiser] if self.rate is None else self.rate

    @property
    def needs_labels(self) -> bool:
        """Whether the loss is of labels."""
        return self.loss != "distillation"

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss is of a teacher's answers."""
        return self.loss != "labels"

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, the first being 0: up in a line, then down along a cosine from the peak.

        >>> [round(Training(rate=1.0, warm_up=0.0).rate_at(step, 4), 3) for step in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [round(Training(rate=1.0, warm_up=0.5).rate_at(step, 4), 3) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
        """
        rise = round(self.warm_up * steps)
        if step < rise:
            return self.peak * ((step + 1) / rise)
        return self.peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise))))


def _plain(name: str, value: Any) -> Any:
    """A number as a float; what is none is left to the checks."""
    try:
        return float(value) if is_number(value) else value
    except OverflowError:
        raise UsageError(f"{name} must be a number that a float can hold, got {shown(value)}.") from None
