"""Training for the experiments: `recoup.finetune`, with the seconds that it took."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

import recoup
from benchmarks.machine import timed
from benchmarks.networks import Batches
from benchmarks.train import Shuffled

BATCH = 256
# Few images make smaller batches: an epoch has at least so many steps.
STEPS = 10
MOMENTUM, DECAY = 0.9, 5e-4
# A tenth of the rate that a network is trained with from nothing.
RETRAINING_RATE = 0.02
# Images up to this many pixels are neither shifted nor flipped: digits would become others.
SMALL = 8


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained copy, and the seconds that it took."""

    model: nn.Module
    seconds: float


def trained(
    model: nn.Module,
    batches: Batches,
    epochs: int,
    *,
    rate: float = RETRAINING_RATE,
    seed: int = 0,
    teacher: nn.Module | None = None,
) -> Trained:
    """A copy of the model after so many epochs of SGD with a cosine schedule, on labels, and a teacher's scores."""
    if not epochs:
        return Trained(model, 0.0)
    seconds: dict[str, float] = {}
    made = timed(seconds, "training", lambda: _finetuned(model, batches, epochs, rate, seed, teacher))
    return Trained(made, seconds["training"])


def _finetuned(
    model: nn.Module, batches: Batches, epochs: int, rate: float, seed: int, teacher: nn.Module | None
) -> nn.Module:
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if images.is_cuda:  # as quick as whoever retrains would have it
        model = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub
        images = images.contiguous(memory_format=torch.channels_last)
    training = recoup.Training(
        epochs=epochs,
        optimiser="sgd",
        rate=rate,
        momentum=MOMENTUM,
        decay=DECAY,
        loss="labels" if teacher is None else "both",
        precision="bfloat16" if images.is_cuda else "float32",
        augment="crop" if images.shape[-1] > SMALL else "none",
        seed=seed,
    )
    size = max(1, min(BATCH, len(images) // STEPS))
    return recoup.finetune(model, Shuffled(images, labels, size), training, teacher=teacher).model
