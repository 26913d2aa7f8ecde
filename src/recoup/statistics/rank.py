"""From a calibration to rankings: the question each group asks of a selector."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.algebra.selection import Layer, Problem, Ranking, ask, loss_along
from recoup.channels.groups import Consumer, Group
from recoup.config import require_progress
from recoup.errors import require_kind
from recoup.inputs.surroundings import undisturbed
from recoup.progress import Progress, silent
from recoup.statistics.calibrate import Calibration
from recoup.statistics.evidence import SharedEvidence
from recoup.statistics.makers import filters_of


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
    layers = tuple(_layer(calibration, consumer, group) for consumer in calibration.structure.consumers_of(group))
    device = layers[0].covariance.device
    free = (~group.locked).to(device)
    method = calibration.method
    filters = filters_of(calibration, group).to(device)
    shared = evidence or SharedEvidence(calibration)
    return Problem(group.width, layers, free, filters, method.ridge, method.seed, shared.of(group))


def _layer(calibration: Calibration, consumer: Consumer, group: Group) -> Layer:
    seen = calibration.statistics[consumer.name]
    local = seen.channel_of - group.start
    inside = (local >= 0) & (local < group.width)
    weight = seen.as_features(calibration.parameters[consumer.weight])
    mean = seen.moments.mean if seen.centred else None  # without a bias, the covariance contains it
    return Layer(seen.covariance, weight, torch.where(inside, local, -1), mean)
