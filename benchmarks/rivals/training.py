"""How all rivals train: SGD with momentum, a cosine schedule, images shifted by up to 1/8 of their sides and flipped.

`finetuned` is the seam: what retrains a network after the cut, by `recoup.finetune`. The recipes' own objectives have a
loop of their own, `batches` and `descend`. Schedule, augmentation and precision are the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import recoup
from benchmarks.train import Shuffled
from recoup.inputs.augment import varied
from recoup.inputs.batches import Inputs

# The part of the steps over which the learning rate rises.
WARM_UP = 0.05

Loss = Callable[[Tensor, Tensor], Tensor]
"""From images and labels to what is to be small."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How to train: `rate` is the highest one; `augment` shifts by up to 1/8 (four pixels of CIFAR) and flips."""

    epochs: int
    rate: float
    batch: int = 128
    momentum: float = 0.9
    decay: float = 5e-4
    augment: bool = True
    seed: int = 0


class Batch(NamedTuple):
    """Images and labels of one step, the learning rate, and whether an epoch ends with it."""

    images: Tensor
    labels: Tensor
    rate: float
    ends_epoch: bool


def finetuned(model: nn.Module, images: Tensor, labels: Tensor, schedule: Schedule) -> nn.Module:
    """A copy of the model, trained on the labels, in evaluation mode."""
    training = recoup.Training(
        epochs=schedule.epochs,
        rate=schedule.rate,
        momentum=schedule.momentum,
        decay=schedule.decay,
        precision="bfloat16" if is_narrow(images.device) else "float32",
        augment="crop" if schedule.augment else "none",
        seed=schedule.seed,
    )
    batches = Shuffled(images, labels, min(schedule.batch, len(images)))
    return recoup.finetune(model, batches, training).model


def minimise(
    loss: Loss,
    parameters: Iterable[Tensor],
    images: Tensor,
    labels: Tensor,
    schedule: Schedule,
    after_epoch: Callable[[], None] = lambda: None,
) -> None:
    """Change `parameters` where they are until `loss` is small; `after_epoch` is called after each pass."""
    with seeded(schedule.seed), torch.enable_grad():
        optimiser = sgd(parameters, schedule)
        for batch in batches(images, labels, schedule):
            descend(optimiser, partial(loss, batch.images, batch.labels), batch)
            if batch.ends_epoch:
                after_epoch()


def descend(optimiser: torch.optim.Optimizer, loss: Callable[[], Tensor], batch: Batch) -> Tensor:
    """The loss, after one step of the optimiser on it."""
    for group in optimiser.param_groups:
        group["lr"] = batch.rate
    with narrow(batch.images.device):
        value = loss()
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(value)
    optimiser.step()
    return value.detach()


def narrow(device: torch.device) -> torch.autocast:
    """The block that every forward pass of a training runs in: its products are narrow where `is_narrow` says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_narrow(device))


def is_narrow(device: torch.device) -> bool:
    """Whether products of a training are in bfloat16: on a GPU."""
    return device.type == "cuda"


def sgd(parameters: Iterable[Tensor], schedule: Schedule) -> torch.optim.SGD:
    """SGD with Nesterov's momentum; weights decay, vectors do not."""
    given = [parameter for parameter in parameters if parameter.requires_grad]
    whole, vectors = ([p for p in given if (p.dim() > 1) == is_whole] for is_whole in (True, False))
    groups = [{"params": whole, "weight_decay": schedule.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        schedule.rate,
        momentum=schedule.momentum,
        nesterov=schedule.momentum > 0,
    )


def batches(images: Tensor, labels: Tensor, schedule: Schedule) -> Iterator[Batch]:
    """Random batches of all epochs; the few images that are left over at the end of one are not used."""
    generator = torch.Generator().manual_seed(schedule.seed)
    size = min(schedule.batch, len(images))
    per_epoch = len(images) // size
    steps = schedule.epochs * per_epoch
    for epoch in range(schedule.epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for number, rows in enumerate(order[: per_epoch * size].split(size), start=1):
            chosen = moved(images[rows], generator) if schedule.augment else images[rows]
            rate = rate_at(epoch * per_epoch + number - 1, steps, schedule.rate)
            yield Batch(chosen, labels[rows], rate, number == per_epoch)


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images (n, c, h, w) shifted and flipped as `recoup.finetune` does it."""
    (found,) = varied(Inputs((images,), {}), "crop", generator).args
    assert isinstance(found, Tensor)
    return found


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: up in a line, down along a cosine."""
    return recoup.Training(rate=peak, warm_up=WARM_UP).rate_at(step, steps)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of the CPU that depend on the seed alone; the caller's go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, but batch norms use the statistics of the batch and keep theirs."""
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.training, norm.momentum = True, 0.0
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def right(scores: Tensor, labels: Tensor) -> float:
    """The share of images whose largest score is that of their label."""
    return float((scores.argmax(1) == labels).double().mean())


def held_out(
    images: Tensor, labels: Tensor, share: float, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images to train on and images to judge by, each with labels; `share` of them judge."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(images.device)
    judges, others = order.split(
        [max(1, math.ceil(share * len(order))), len(order) - max(1, math.ceil(share * len(order)))]
    )
    return (images[others], labels[others]), (images[judges], labels[judges])
