"""DCP: discrimination-aware channel pruning (Zhuang et al. 2018, arXiv 1810.11809).

Additional losses L_S sit at a few layers: batch norm, ReLU, average pooling and a linear classifier on what the layer
makes. First the network is trained with all of them beside its own loss. Then, layer after layer, a set A of channels
grows from nothing, each time by the channel whose weights W_j have the largest gradient of

    L = L_M + lambda L_S,   L_M = mean (O - O_b)^2,   j = argmax_{j not in A} ||dL / dW_j||_F,

with O_b what the layers that read the channels make in the whole network, and L_S the next additional loss behind them,
at the end the network's own. A channel that is chosen gets its weights back, and the weights of A take steps of SGD
on L. The network is fine-tuned at last.

From the authors' code for CIFAR-10: three additional losses, 100 epochs with them at rate 0.1, lambda = 1, rate 0.01
for the weights of A, 400 epochs of fine-tuning at rate 0.1, decay 1e-4. Ours: a gradient is that of `images` random
images, not of all; one step of SGD per channel; a coupled group adds up what all its readers say.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import filter_norms
from benchmarks.machine import timed
from benchmarks.rivals.channels import Pruned, Reader, Subject, called, column_sums, counts_by_share, cut, subject_of
from benchmarks.rivals.training import Schedule, finetuned, minimise, seeded
from recoup.channels.structure import Group
from recoup.config import require_whole

# The published schedules, or ours where the docstring says so.
TRAINING = Schedule(epochs=100, rate=0.1, decay=1e-4)
TUNING = Schedule(epochs=400, rate=0.1, decay=1e-4)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep; how many losses, their weight, images and rate of a choice; the schedules."""

    share: float = 0.5
    losses: int = 3
    discrimination: float = 1.0
    images: int = 512
    rate: float = 0.01
    training: Schedule = TRAINING
    tuning: Schedule = TUNING

    def __post_init__(self) -> None:
        if self.losses:  # heads that have learnt nothing would choose
            require_whole("training.epochs", self.training.epochs)


class AdditionalLoss(nn.Module):
    """The cross-entropy of a linear classifier on the pooled, normalised features of a layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm, self.classifier = nn.BatchNorm1d(channels), nn.Linear(channels, classes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Features (n, channels, ...) and labels (n,) to the mean loss."""
        pooled = F.relu(self.norm(features.float().flatten(2) if features.dim() > 2 else features.float()[..., None]))
        return F.cross_entropy(self.classifier(pooled.mean(2)).float(), labels)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a choice looks at: the subject, the whole network, the additional losses by layer, images and labels."""

    subject: Subject
    whole: nn.Module
    losses: Mapping[str, AdditionalLoss]
    images: Tensor
    labels: Tensor
    settings: Settings


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of losses, choice, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    losses = timed(seconds, "losses", lambda: trained_losses(subject, images, labels, settings))
    choice = Choice(subject, copy.deepcopy(subject.model), losses, images, labels, settings)
    keep = timed(seconds, "choice", lambda: chosen(choice))
    smaller = timed(seconds, "cut", lambda: cut(subject, keep))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def trained_losses(subject: Subject, images: Tensor, labels: Tensor, settings: Settings) -> dict[str, AdditionalLoss]:
    """Additional losses by the layer they sit at, trained together with the subject's model."""
    model = subject.model
    makers = [group.producers[0] for group in subject.groups]
    places = [makers[(part + 1) * len(makers) // (settings.losses + 1)] for part in range(settings.losses)]
    with recorded(model, places) as seen, torch.no_grad(), seeded(settings.training.seed):
        classes = model(images[:1]).shape[1]
        losses = {name: AdditionalLoss(value.shape[1], classes).to(images.device) for name, value in seen.items()}
    model.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with recorded(model, places) as seen:
            own = F.cross_entropy(model(x).float(), y)
        return torch.stack([own, *(head(seen[name], y) for name, head in losses.items())]).sum()

    everything = [*model.parameters(), *(p for head in losses.values() for p in head.parameters())]
    minimise(loss, everything, images, labels, settings.training)
    model.eval()
    return {name: head.eval() for name, head in losses.items()}


def chosen(choice: Choice) -> Tensor:
    """The mask of the channels that were chosen, group after group; the subject's weights have followed."""
    subject = choice.subject
    counts = counts_by_share(subject, filter_norms(subject.structure, subject.model))
    keep, makers = subject.structure.keep_all(), [group.producers[0] for group in subject.groups]
    generator = torch.Generator().manual_seed(choice.settings.training.seed)
    for number, group in enumerate(subject.groups):
        behind = next((name for name in makers[number + 1 :] if name in choice.losses), None)
        keep[group.channels] = chosen_of(choice, group, counts[group.name], behind, generator)
    return keep


def chosen_of(choice: Choice, group: Group, count: int, behind: str | None, generator: torch.Generator) -> Tensor:
    """The mask over a group's channels of the `count` that were chosen greedily."""
    subject, rate = choice.subject, choice.settings.rate
    readers = subject.readers_of(group)
    old = {reader.weight: subject.model.get_parameter(reader.weight).detach() for reader in readers}
    keep = group.locked.clone()
    weights = {reader.weight: old[reader.weight] * _inside(reader, subject, group, keep) for reader in readers}
    while int(keep.sum()) < count:
        rows = torch.randperm(len(choice.images), generator=generator)[: choice.settings.images]
        gradients = _gradients(choice, readers, weights, behind, rows.to(choice.images.device))
        squares = column_sums(subject, {name: value.square() for name, value in gradients.items()})
        keep[int(squares[group.channels].cpu().masked_fill(keep, -torch.inf).argmax())] = True
        for reader in readers:
            # What was chosen moves on, what is new starts from its old weights.
            factor = _inside(reader, subject, group, keep)
            moved = weights[reader.weight] - rate * gradients[reader.weight]
            fresh = weights[reader.weight] == 0
            weights[reader.weight] = torch.where(fresh, old[reader.weight], moved) * factor
    with torch.no_grad():
        for name, weight in weights.items():
            subject.model.get_parameter(name).copy_(weight)
    return keep


def _inside(reader: Reader, subject: Subject, group: Group, keep: Tensor) -> Tensor:
    """The factor on a reader's weight that leaves of the group's channels those in `keep`, and all of others."""
    mask = torch.ones(subject.structure.width)
    mask[group.channels] = keep.float()
    weight = subject.model.get_parameter(reader.weight)
    return reader.along(mask.to(weight.device), weight)


def _gradients(
    choice: Choice, readers: list[Reader], weights: Mapping[str, Tensor], behind: str | None, rows: Tensor
) -> dict[str, Tensor]:
    """The gradients of reconstruction and discrimination by the weights of the readers."""
    model, images, labels = choice.subject.model, choice.images[rows], choice.labels[rows]
    layers = [reader.module for reader in readers]
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    with torch.no_grad(), recorded(choice.whole, layers) as aims:
        choice.whole(images)
    with torch.enable_grad():
        with recorded(model, [*layers, *([behind] if behind else [])]) as seen:
            scores = called(model, leaves, images)
        own = choice.losses[behind](seen[behind], labels) if behind else F.cross_entropy(scores, labels)
        loss = choice.settings.discrimination * own
        for layer in layers:
            loss = loss + F.mse_loss(seen[layer].float(), aims[layer].float())
        found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


@contextmanager
def recorded(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """What the named modules return while the block runs, by name."""
    seen: dict[str, Tensor] = {}

    def note(name: str, *call: Any) -> None:
        seen[name] = call[-1]

    handles = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in dict.fromkeys(names)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
