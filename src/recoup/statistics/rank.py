"""From a calibration to rankings: the question each group asks of a selector."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recoup.algebra.linalg import live_rows
from recoup.algebra.moments import Moments
from recoup.algebra.selection import Layer, Problem, Ranking, ask, loss_along
from recoup.algebra.selection.problem import output_variance
from recoup.channels.structure import Consumer, Group
from recoup.config import require_progress
from recoup.errors import IllConditionedError, require_kind
from recoup.inputs.surroundings import undisturbed
from recoup.progress import Progress, silent
from recoup.statistics.calibrate import Calibration, Statistics
from recoup.statistics.evidence import SharedEvidence
from recoup.statistics.makers import filters_of
from recoup.statistics.sums import Pattern


@undisturbed
def rank(calibration: Calibration, progress: Progress = silent) -> dict[str, Ranking]:
    """For every prunable group, its channels from the most to the least valuable, as the method's selector says.

    Raises:
        IllConditionedError: there is no ridge, and a layer has no more samples than inputs that vary.
    """
    require_kind("calibration", calibration, Calibration, "what recoup.calibrate returns")
    require_progress(progress)
    _require_samples(calibration)
    rankings = {}
    groups, evidence = calibration.structure.prunable, SharedEvidence(calibration)
    for number, group in enumerate(groups, start=1):
        rankings[group.name] = ask(problem_of(calibration, group, evidence), calibration.method.selector, group.name)
        progress("rank", number, len(groups))
    return rankings


def loss_of(calibration: Calibration, group: Group, ranking: Ranking, order: Tensor) -> Tensor:
    """The loss at every width (width + 1,): what the ranking's selector says, or the loss along the order that is cut.

    `order` are the group's channels, numbered from 0, which may have constant ones behind others.
    """
    loss = ranking.loss
    if loss is None or (group.parts is not None and not torch.equal(order, ranking.order.cpu())):
        problem = problem_of(calibration, group)
        loss = loss_along(problem, order.to(problem.device))
    return loss[[group.rounded(count) for count in range(group.width + 1)]]


def problem_of(calibration: Calibration, group: Group, evidence: SharedEvidence | None = None) -> Problem:
    """The group's question as algebra sees it; what is measured on request is shared with other groups."""
    readers = calibration.structure.consumers_of(group)
    layers = tuple(layer for consumer in readers for layer in _layers(calibration, consumer, group))
    device = layers[0].covariance.device
    free = (~group.locked).to(device)
    method = calibration.method
    filters = filters_of(calibration, group).to(device)
    shared = evidence or SharedEvidence(calibration)
    is_parted = any(calibration.statistics[consumer.name].patterns for consumer in readers)
    whole = tuple(_whole(calibration, consumer, group) for consumer in readers) if is_parted else ()
    given, parts = shared.of(group), None if group.parts is None else group.parts.to(device)
    return Problem(group.width, layers, free, filters, method.ridge, method.seed, given, whole, group.name, parts)


def _require_samples(calibration: Calibration) -> None:
    """Without a ridge, what is no combination of others may look like one for want of samples."""
    if calibration.method.ridge > 0:
        return
    for name, seen in calibration.statistics.items():
        for moments in (seen.moments, *(pattern.moments for pattern in seen.patterns)):
            inputs, samples = int(live_rows(moments.covariance).sum()) // seen.parts, moments.effective
            if inputs and samples <= inputs:
                raise IllConditionedError(
                    f"{name}: {samples:,.0f} samples tell nothing of {inputs:,} inputs without a ridge: every input "
                    "looks like a combination of others. Calibrate on more images or positions, or give a `ridge`."
                )


def _whole(calibration: Calibration, consumer: Consumer, group: Group) -> Layer:
    """The consumer in one piece, with statistics under the mean slope of all its outputs."""
    seen = calibration.statistics[consumer.name]
    weight = seen.as_features(calibration.weight(consumer))
    return Layer(seen.covariance, weight, _channels(seen, group), _mean(seen, seen.moments))


def _channels(seen: Statistics, group: Group) -> Tensor:
    """The channel of the group, from 0, that each row belongs to; -1 for others."""
    local = seen.channel_of - group.start
    return torch.where((local >= 0) & (local < group.width), local, -1)


def _layers(calibration: Calibration, consumer: Consumer, group: Group) -> tuple[Layer, ...]:
    """The consumer, or a part of it for each pattern of its outputs; their losses add up to E|g'(y)(y - ŷ)|²."""
    seen = calibration.statistics[consumer.name]
    if not seen.patterns:
        return (_whole(calibration, consumer, group),)
    weight, channel_of = calibration.weight(consumer), _channels(seen, group)
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
