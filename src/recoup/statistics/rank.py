"""From a calibration to rankings: the question each group asks of a selector."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recoup.algebra.moments import Moments
from recoup.algebra.selection import Layer, Problem, Ranking, ask, loss_along
from recoup.algebra.selection.problem import output_variance
from recoup.channels.groups import Consumer, Group
from recoup.config import require_progress
from recoup.errors import require_kind
from recoup.inputs.surroundings import undisturbed
from recoup.progress import Progress, silent
from recoup.statistics.calibrate import Calibration, Statistics
from recoup.statistics.evidence import SharedEvidence
from recoup.statistics.makers import filters_of
from recoup.statistics.sums import Pattern


@undisturbed
def rank(calibration: Calibration, progress: Progress = silent) -> dict[str, Ranking]:
    """For every prunable group, its channels from the most to the least valuable, as the method's selector says."""
    require_kind("calibration", calibration, Calibration, "what recoup.calibrate returns")
    require_progress(progress)
    rankings = {}
    groups, evidence = calibration.structure.prunable, SharedEvidence(calibration)
    for number, group in enumerate(groups, start=1):
        rankings[group.name] = ask(problem_of(calibration, group, evidence), calibration.method.selector, group.name)
        progress("rank", number, len(groups))
    return rankings


def loss_of(calibration: Calibration, group: Group, ranking: Ranking) -> Tensor:
    """The loss at every width of a ranking (width + 1,): what its selector says, or the loss along its order."""
    return ranking.loss if ranking.loss is not None else loss_along(problem_of(calibration, group), ranking.order)


def problem_of(calibration: Calibration, group: Group, evidence: SharedEvidence | None = None) -> Problem:
    """The group's question as algebra sees it; what is measured on request is shared with other groups."""
    readers = calibration.structure.consumers_of(group)
    layers = tuple(layer for consumer in readers for layer in _layers(calibration, consumer, group))
    device = layers[0].covariance.device
    free = (~group.locked).to(device)
    method = calibration.method
    filters = filters_of(calibration, group).to(device)
    shared = evidence or SharedEvidence(calibration)
    return Problem(group.width, layers, free, filters, method.ridge, method.seed, shared.of(group))


def _layers(calibration: Calibration, consumer: Consumer, group: Group) -> tuple[Layer, ...]:
    """The consumer, or a part of it for each pattern of its outputs; their losses add up to E|g'(y)(y - ŷ)|²."""
    seen = calibration.statistics[consumer.name]
    local = seen.channel_of - group.start
    channel_of = torch.where((local >= 0) & (local < group.width), local, -1)
    weight = calibration.parameters[consumer.weight]
    if not seen.patterns:
        return (Layer(seen.covariance, seen.as_features(weight), channel_of, _mean(seen, seen.moments)),)
    parts = [
        Layer(seen.minimised(p.moments), _weighed(seen, p, weight), channel_of, _mean(seen, p.moments))
        for p in seen.patterns
    ]
    total = sum(output_variance(part) for part in parts)  # outputs that hardly count may weigh little beside others
    return tuple(replace(part, scale=total) for part in parts)


def _mean(seen: Statistics, moments: Moments) -> Tensor | None:
    return moments.mean if seen.centred else None  # without a bias, the covariance contains it


def _weighed(seen: Statistics, pattern: Pattern, weight: Tensor) -> Tensor:
    """A pattern's outputs as features, each with the root of its mean slope g'(y)²: errors count by their square."""
    some = seen.of_outputs(weight, pattern.outputs).double()
    shape = [-1 if dim == 1 - seen.input_dim else 1 for dim in range(some.dim())]
    return seen.as_features(some * pattern.slopes.sqrt().view(shape))
