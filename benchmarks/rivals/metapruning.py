"""MetaPruning (Liu et al. 2019, arXiv 1903.10258): weights made by small networks, widths found by evolution.

For every layer a network of two linear layers makes the weights from the widths around it, w = B relu(A e), with e the
shares kept of the layer's outputs and inputs; the weights are cropped to the first channels of each group. It trains
with other random widths at every step. Then an evolutionary search asks it how good a network of given widths would be:
the best are kept, mutated and crossed. The winner's network is trained from scratch.

From the authors' code, made for ImageNet: 31 widths from 10 % to 100 %, 32 hidden units, 20 generations of 50, half of
them mutants (each width with probability 0.1) and half crossings of the best 10, 32 epochs for the generators. The
epochs of the last training are ours, as usual for CIFAR. Ours too: candidates are not rejected but scaled to the
budget, and drawn again, ten times at most, where these widths are known; batch norms use the statistics of the images
they are judged on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

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
from recoup.config import require_whole

WIDTHS = tuple(0.1 + 0.03 * step for step in range(31))
# The published schedules, or ours where the docstring says so.
GENERATORS = Schedule(epochs=32, rate=0.1, decay=1e-4)
TUNING = Schedule(epochs=200, rate=0.1)


# Draws for each candidate that is to be new.
TRIES = 10

Gene: TypeAlias = Mapping[str, float]
"""The share of every group, up to a common factor that the budget decides."""
Key: TypeAlias = tuple[int, ...]
"""The widths of all groups in their order."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Widths and how good they are."""

    counts: Counts
    fitness: float


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

    def __post_init__(self) -> None:
        for name, least in (("generations", 1), ("population", 2), ("parents", 2)):
            require_whole(name, getattr(self, name), least)
        require_whole("generators.epochs", self.generators.epochs)


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
    """The fittest widths that an evolution finds; all candidates are within the budget, and none is asked twice."""
    draw, known = random.Random(settings.generators.seed), dict[Key, Candidate]()
    for _ in range(settings.generations):
        parents = [_shares(subject, found.counts) for found in _fittest(known, settings.parents)]
        for key, counts in bred(subject, parents, known, settings, draw).items():
            known[key] = Candidate(counts, fitness(counts))
    return dict(_fittest(known, 1)[0].counts)


def bred(
    subject: Subject, parents: Sequence[Gene], known: Collection[Key], settings: Settings, draw: random.Random
) -> dict[Key, dict[str, int]]:
    """Widths that are not known yet: half mutants, half crossings, random ones where these give nothing new."""
    fresh: dict[Key, dict[str, int]] = {}

    def add(make: Callable[[], Gene], upto: int) -> None:
        for _ in range(TRIES * (upto - len(fresh))):
            if len(fresh) < upto:
                counts = counts_by_weight(subject, make())
                fresh.update({} if (key := tuple(counts.values())) in known else {key: counts})

    if len(parents) > 1:
        add(lambda: mutant(draw.choice(parents), draw, settings.mutation), settings.population // 2)
        add(partial(crossing_of, parents, draw), settings.population)
    add(lambda: random_gene(subject, draw), settings.population)
    return fresh


def _fittest(known: Mapping[Key, Candidate], count: int) -> list[Candidate]:
    return sorted(known.values(), key=lambda found: -found.fitness)[:count]


def random_gene(subject: Subject, draw: random.Random) -> dict[str, float]:
    """A share for every group, drawn from all widths."""
    return {group.name: draw.choice(WIDTHS) for group in subject.groups}


def mutant(gene: Gene, draw: random.Random, probability: float) -> dict[str, float]:
    """A gene some of whose shares are drawn again."""
    return {name: draw.choice(WIDTHS) if draw.random() < probability else share for name, share in gene.items()}


def crossing(one: Gene, other: Gene, draw: random.Random) -> dict[str, float]:
    """A gene with each share from either of two."""
    return {name: draw.choice((share, other[name])) for name, share in one.items()}


def crossing_of(genes: Sequence[Gene], draw: random.Random) -> dict[str, float]:
    """A crossing of two different ones of `genes`."""
    one, other = draw.sample(genes, 2)
    return crossing(one, other, draw)


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
