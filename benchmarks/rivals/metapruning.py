"""MetaPruning (Liu et al. 2019, arXiv 1903.10258): weights made by small networks, widths found by evolution.

For every layer a network of two linear layers makes the weights from the widths around it, w = B relu(A e), with e the
shares kept of the layer's outputs and inputs; the weights are cropped to the first channels of each group. It trains
with other random widths at every step. Then an evolutionary search asks it how good a network of given widths would be:
the best are kept, mutated and crossed. The winner's network is trained from scratch.

From the authors' code, made for ImageNet: 31 widths from 10 % to 100 %, 32 hidden units, 20 generations of 50, half of
them mutants (each width with probability 0.1) and half crossings of the best 10, 32 epochs for the generators. The
epochs of the last training are ours, as usual for CIFAR. Ours too: candidates are not rejected but scaled to the
budget; batch norms use the statistics of the images they are judged on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import filter_norms
from benchmarks.machine import timed
from benchmarks.rivals.channels import (
    Counts,
    Pruned,
    Subject,
    best_first,
    called,
    counts_by_weight,
    cut,
    keep_first,
    subject_of,
)
from benchmarks.rivals.training import Schedule, batch_statistics, finetuned, held_out, minimise, right, seeded

WIDTHS = tuple(0.1 + 0.03 * step for step in range(31))
# The published schedules, or ours where the docstring says so.
GENERATORS = Schedule(epochs=32, rate=0.1, decay=1e-4)
TUNING = Schedule(epochs=200, rate=0.1)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, the size of the generators and of the search, and the schedules."""

    share: float = 0.5
    hidden: int = 32
    generations: int = 20
    population: int = 50
    parents: int = 10
    mutation: float = 0.1
    judges: float = 0.05
    from_scratch: bool = True
    generators: Schedule = GENERATORS
    tuning: Schedule = TUNING


class Generator(nn.Module):
    """The weight of one layer from the shares kept of its outputs and inputs, at full size."""

    def __init__(self, shape: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        self.shape = shape
        self.first, self.last = nn.Linear(2, hidden), nn.Linear(hidden, math.prod(shape))
        # As large as weights are at the start of a training.
        nn.init.normal_(self.last.weight, std=math.sqrt(2 / (math.prod(shape[1:]) * hidden)))
        nn.init.zeros_(self.last.bias)

    def forward(self, shares: Tensor) -> Tensor:
        """Two shares to a weight."""
        weight: Tensor = self.last(F.relu(self.first(shares)))
        return weight.view(self.shape)


class WeightMaker(nn.Module):
    """All generators of a network: from widths to the weights of every layer that groups of channels touch."""

    def __init__(self, subject: Subject, hidden: int) -> None:
        super().__init__()
        self._subject, structure = [subject], subject.structure  # in a list: its model is no part of this module
        sites = {(site.tensor, site.dim): site.channel_of for site in structure.sites}
        names = dict.fromkeys(p.weight for p in structure.products if any((p.weight, dim) in sites for dim in (0, 1)))
        self.names = [name for name in names if name in dict(subject.model.named_parameters())]
        self._sides = {name: [sites.get((name, dim)) for dim in (0, 1)] for name in self.names}
        self.generators = nn.ModuleList(Generator(structure.shapes[name], hidden) for name in self.names)
        self._orders = best_first(structure, torch.zeros(structure.width))

    def forward(self, counts: Counts) -> dict[str, Tensor]:
        """The weights by name, zero outside the first `counts` channels of every group."""
        (subject,) = self._subject
        keep = keep_first(subject.structure, self._orders, counts)
        made = {}
        for name, generator in zip(self.names, self.generators, strict=True):
            masks = [None if side is None else subject.structure.keep_indices(side, keep) for side in self._sides[name]]
            shares = [1.0 if mask is None else float(mask.float().mean()) for mask in masks]
            weight = generator(torch.tensor(shares, device=subject.device))
            for dim, mask in enumerate(masks):
                if mask is not None:
                    along = [-1 if place == dim else 1 for place in range(weight.dim())]
                    weight = weight * mask.to(weight.device, weight.dtype).view(along)
            made[name] = weight
        return made


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of generators, search, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    score = filter_norms(subject.structure, subject.model)
    original = cut(subject, subject.structure.keep_all()).state_dict()
    trained, judges = held_out(images, labels, settings.judges, settings.generators.seed)
    maker = timed(seconds, "generators", lambda: trained_maker(subject, *trained, settings))

    def fitness(counts: Counts) -> float:
        with torch.no_grad(), batch_statistics(subject.model):
            return right(called(subject.model, maker(counts), judges[0]), judges[1])

    counts = timed(seconds, "search", lambda: evolved(subject, fitness, settings))
    subject.model.load_state_dict(original)  # the batch norms learnt with the generators
    keep = keep_first(subject.structure, best_first(subject.structure, score), counts)
    smaller = timed(seconds, "cut", lambda: cut(subject, keep))
    if settings.from_scratch:
        reset(smaller, settings.tuning.seed)
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def trained_maker(subject: Subject, images: Tensor, labels: Tensor, settings: Settings) -> WeightMaker:
    """The generators, trained over random widths."""
    model, draw = subject.model.train(), random.Random(settings.generators.seed)
    with seeded(settings.generators.seed):
        maker = WeightMaker(subject, settings.hidden).to(subject.device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        widths = {group.name: max(1, round(draw.choice(WIDTHS) * group.width)) for group in subject.groups}
        return F.cross_entropy(called(model, maker(_at_least(subject, widths)), x), y)

    own = [parameter for name, parameter in model.named_parameters() if name not in maker.names]
    minimise(loss, [*maker.parameters(), *own], images, labels, settings.generators)
    model.eval()
    return maker


def evolved(subject: Subject, fitness: Callable[[Counts], float], settings: Settings) -> dict[str, int]:
    """The fittest widths that an evolution finds; all candidates are within the budget."""
    draw = random.Random(settings.generators.seed)
    genes = [random_gene(subject, draw) for _ in range(settings.population)]
    known: dict[tuple[int, ...], tuple[float, dict[str, int]]] = {}
    for _ in range(settings.generations):
        for counts in (counts_by_weight(subject, gene) for gene in genes):
            key = tuple(counts.values())
            if key not in known:
                known[key] = (fitness(counts), counts)
        best = sorted(known.values(), key=lambda pair: -pair[0])[: settings.parents]
        parents = [_shares(subject, counts) for _, counts in best]
        half = settings.population // 2
        genes = [mutant(draw.choice(parents), draw, settings.mutation) for _ in range(half)]
        genes += [crossing(draw.choice(parents), draw.choice(parents), draw) for _ in range(half)]
    return best[0][1]


def random_gene(subject: Subject, draw: random.Random) -> dict[str, float]:
    """A share for every group, drawn from all widths."""
    return {group.name: draw.choice(WIDTHS) for group in subject.groups}


def mutant(gene: Mapping[str, float], draw: random.Random, probability: float) -> dict[str, float]:
    """A gene some of whose shares are drawn again."""
    return {name: draw.choice(WIDTHS) if draw.random() < probability else share for name, share in gene.items()}


def crossing(one: Mapping[str, float], other: Mapping[str, float], draw: random.Random) -> dict[str, float]:
    """A gene with each share from either of two."""
    return {name: draw.choice((share, other[name])) for name, share in one.items()}


def reset(model: nn.Module, seed: int) -> None:
    """Give the model fresh weights, as its layers draw them."""
    with seeded(seed):
        for module in model.modules():
            renew = getattr(module, "reset_parameters", None)
            if renew is not None:
                renew()


def _shares(subject: Subject, counts: Counts) -> dict[str, float]:
    return {group.name: counts[group.name] / group.width for group in subject.groups}


def _at_least(subject: Subject, counts: Counts) -> dict[str, int]:
    """`counts`, with room for the channels that have to stay."""
    return {group.name: max(counts[group.name], group.width - group.free) for group in subject.groups}
