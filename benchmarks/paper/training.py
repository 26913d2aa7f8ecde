"""Training for the experiments: `recoup.finetune`, with the seconds that it took."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import recoup
from benchmarks.machine import timed
from benchmarks.networks import Batches

BATCH = 256
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
    model: nn.Module, batches: Batches, epochs: int, *, rate: float = RETRAINING_RATE, seed: int = 0
) -> Trained:
    """A copy of the model after so many epochs of SGD with a cosine schedule, on labels."""
    if not epochs:
        return Trained(model, 0.0)
    seconds: dict[str, float] = {}
    learn = _finetuned if hasattr(recoup, "finetune") else _by_hand
    made = timed(seconds, "training", lambda: learn(model, batches, epochs, rate, seed))
    return Trained(made, seconds["training"])


def _finetuned(model: nn.Module, batches: Batches, epochs: int, rate: float, seed: int) -> nn.Module:
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    small = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    finetune, settings = (getattr(recoup, name) for name in ("finetune", "Training"))
    training = settings(
        epochs=epochs,
        optimiser="sgd",
        rate=rate,
        momentum=MOMENTUM,
        decay=DECAY,
        loss="labels",
        precision="bfloat16" if images.is_cuda else "float32",
        augment="crop" if images.shape[-1] > SMALL else "none",
        seed=seed,
    )
    made: nn.Module = finetune(model, small, training=training).model
    return made


def _by_hand(model: nn.Module, batches: Batches, epochs: int, rate: float, seed: int) -> nn.Module:
    """The same without `recoup.finetune`; images are neither shifted nor flipped."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    learner = copy.deepcopy(model).train()
    for parameter in learner.parameters():
        parameter.requires_grad_()
    optimiser = torch.optim.SGD(learner.parameters(), rate, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    generator, size = torch.Generator().manual_seed(seed), min(BATCH, max(2, len(images) // 8))
    steps, done = epochs * (len(images) // size), 0
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(images), generator=generator)[: len(images) // size * size].split(size):
                optimiser.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done / steps))
                loss = F.cross_entropy(learner(images[rows.to(images.device)]), labels[rows.to(images.device)])
                optimiser.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                optimiser.step()
                done += 1
    return learner.eval()
