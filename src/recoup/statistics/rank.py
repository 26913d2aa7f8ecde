"""From a calibration to rankings: the question each group asks of a selector."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from recoup.algebra.selection import Layer, Problem, Ranking, ask
from recoup.algebra.selection.elimination import rows_by_channel
from recoup.algebra.selection.problem import output_variance
from recoup.channels.groups import Consumer, Group
from recoup.config import require_progress
from recoup.errors import require_kind
from recoup.inputs.surroundings import undisturbed
from recoup.progress import Progress, silent
from recoup.statistics.calibrate import Calibration, Statistics
from recoup.statistics.sums import Pattern


@undisturbed
def rank(calibration: Calibration, progress: Progress = silent) -> dict[str, Ranking]:
    """For every prunable group, its channels from the most to the least valuable, as the method's selector says."""
    require_kind("calibration", calibration, Calibration, "what recoup.calibrate returns")
    require_progress(progress)
    rankings = {}
    groups = calibration.structure.prunable
    for number, group in enumerate(groups, start=1):
        rankings[group.name] = ask(problem_of(calibration, group), calibration.method.selector, group.name)
        progress("rank", number, len(groups))
    return rankings


def problem_of(calibration: Calibration, group: Group) -> Problem:
    """The group's question as algebra sees it."""
    readers = calibration.structure.consumers_of(group)
    layers = tuple(layer for consumer in readers for layer in _layers(calibration, consumer, group))
    device = layers[0].covariance.device
    free = (~group.locked).to(device)
    method = calibration.method
    return Problem(group.width, layers, free, _filters(calibration, group).to(device), method.ridge, method.seed)


def _layers(calibration: Calibration, consumer: Consumer, group: Group) -> tuple[Layer, ...]:
    """The consumer, or a part of it for each pattern of its outputs; their losses add up to E|g'(y)(y - ŷ)|²."""
    seen = calibration.statistics[consumer.name]
    local = seen.channel_of - group.start
    channel_of = torch.where((local >= 0) & (local < group.width), local, -1)
    weight = calibration.parameters[consumer.weight]
    if not seen.patterns:
        return (Layer(seen.covariance, seen.as_features(weight), channel_of),)
    parts = [Layer(seen.minimised(p.moments), _weighed(seen, p, weight), channel_of) for p in seen.patterns]
    total = sum(output_variance(part) for part in parts)  # outputs that hardly count may weigh little beside others
    return tuple(replace(part, scale=total) for part in parts)


def _weighed(seen: Statistics, pattern: Pattern, weight: Tensor) -> Tensor:
    """A pattern's outputs as features, each with the root of its mean slope g'(y)²: errors count by their square."""
    some = seen.of_outputs(weight, pattern.outputs).double()
    shape = [-1 if dim == 1 - seen.input_dim else 1 for dim in range(some.dim())]
    return seen.as_features(some * pattern.slopes.sqrt().view(shape))


def _filters(calibration: Calibration, group: Group) -> Tensor:
    """The weights that produce each channel (width, f), all producers side by side."""
    structure = calibration.structure
    sites = {(site.tensor, site.dim): site.channel_of for site in structure.sites}
    makers = dict.fromkeys((p.weight, p.output_dim) for p in structure.products if p.input_dim is not None)
    own = [
        maker for maker in makers if maker in sites
    ]  # a computed weight that loses nothing has no place in the class
    columns = [_rows_of(group, calibration.parameters[w].movedim(dim, 0), sites[w, dim]) for w, dim in own]
    found = [column for column in columns if column is not None]
    return torch.cat(found, dim=1) if found else torch.ones(group.width, 1)


def _rows_of(group: Group, weight: Tensor, channel_of: Tensor) -> Tensor | None:
    """What a weight holds for each channel of the group (width, f); None if it makes none of them.

    A channel that consists of several rows, such as a head, has them side by side, and zeros where others have more.
    """
    inside = (channel_of >= group.start) & (channel_of < group.start + group.width)
    if not bool(inside.any()):
        return None
    local = torch.where(inside, channel_of - group.start, -1).to(weight.device)
    rows, is_row = rows_by_channel(local, group.width, torch.ones_like(local, dtype=torch.bool))
    return (weight.flatten(1)[rows] * is_row[:, :, None]).flatten(1)
