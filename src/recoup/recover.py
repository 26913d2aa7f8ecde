"""Selection and compensation for whole networks: from a calibration to rankings, and from kept channels to a plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recoup.algebra.compensation import Compensated, rescale_variance
from recoup.algebra.compensation import compensate as refit
from recoup.algebra.selection import Layer, Problem, Ranking, Selector, rank
from recoup.calibrate import Calibration
from recoup.errors import UsageError
from recoup.plan import Plan, Recovery, Slice
from recoup.progress import Progress, silent
from recoup.structure.groups import Consumer, Group, Structure


def select(
    calibration: Calibration, selector: str | Selector | None = None, progress: Progress = silent
) -> dict[str, Ranking]:
    """For every prunable group, its channels from the most to the least valuable."""
    selector = selector or calibration.settings.selector
    rankings = {}
    groups = calibration.structure.prunable
    for number, group in enumerate(groups, start=1):
        rankings[group.name] = rank(problem_of(calibration, group), selector, group.name)
        progress("select", number, len(groups))
    return rankings


def compensate(calibration: Calibration, keep: Tensor | Mapping[str, Tensor]) -> Plan:
    """The plan that keeps `keep` (a mask over all channels, or one by group) and refits every layer it touches."""
    return Compensator(calibration).plan(keep_mask(calibration, keep))


class Compensator:
    """Makes plans, and remembers layers it has solved: a search asks for the same ones again and again."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._solved: dict[tuple[str, bytes], tuple[dict[str, Tensor], Recovery]] = {}

    def plan(self, keep: Tensor) -> Plan:
        """The plan for a mask over all channels."""
        structure = self._calibration.structure
        weights: dict[str, Tensor] = {}
        recovery: dict[str, Recovery] = {}
        for consumer in structure.consumers:
            kept_inputs = structure.keep_indices(consumer.inputs, keep)
            if not bool(kept_inputs.all()):
                layer, recovery[consumer.name] = self._solve(consumer, kept_inputs, keep)
                weights.update(layer)
        slices = (*structure.slices(keep), *self._slices_of_new_biases(weights, keep))
        touched = {*weights, *(piece.tensor for piece in slices)}
        shapes = {name: structure.shapes[name] for name in sorted(touched) if name in structure.shapes}
        return Plan(structure.masks(keep), slices, weights, shapes, recovery)

    def _slices_of_new_biases(self, weights: Mapping[str, Tensor], keep: Tensor) -> list[Slice]:
        """A bias that its layer did not have before loses the same outputs as the weight."""
        structure = self._calibration.structure
        new = [c for c in structure.consumers if c.bias in weights and c.bias not in structure.shapes]
        masks = {consumer.bias: structure.keep_indices(consumer.outputs, keep) for consumer in new}
        return [Slice(bias, 0, m.nonzero().squeeze(1)) for bias, m in masks.items() if not bool(m.all())]

    def _solve(self, consumer: Consumer, kept: Tensor, keep: Tensor) -> tuple[dict[str, Tensor], Recovery]:
        key = (consumer.name, kept.numpy().tobytes())
        if key not in self._solved:
            self._forget(consumer.name)
            self._solved[key] = _refit(self._calibration, consumer, keep)
        return self._solved[key]

    def _forget(self, name: str, most: int = 4) -> None:
        """Keep a few solutions per layer: a bisection only ever returns to the last ones."""
        known = [key for key in self._solved if key[0] == name]
        for key in known[: max(0, len(known) + 1 - most)]:
            del self._solved[key]


def keep_mask(calibration: Calibration, keep: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A checked bool mask over all channels, from one or from masks by group (groups not named stay whole)."""
    structure = calibration.structure
    mask = structure.keep_all()
    if isinstance(keep, Tensor):
        mask = keep.cpu()
    else:
        for name, part in keep.items():
            known = {group.name: group for group in structure.groups}
            if name not in known:
                raise UsageError(f"there is no group {name!r}; the groups are {', '.join(known)}.")
            mask[known[name].channels] = part.cpu()
    _check_mask(mask, structure)
    return mask


def problem_of(calibration: Calibration, group: Group) -> Problem:
    """The group's question as algebra sees it."""
    layers = tuple(_layer(calibration, name, group) for name in group.consumers)
    device = layers[0].covariance.device
    free = (~group.locked).to(device)
    settings = calibration.settings
    return Problem(group.width, layers, free, _filters(calibration, group).to(device), settings.ridge, settings.seed)


def _layer(calibration: Calibration, name: str, group: Group) -> Layer:
    seen = calibration.statistics[name]
    local = seen.channel_of - group.start
    inside = (local >= 0) & (local < group.width)
    weight = seen.as_features(calibration.parameters[f"{name}.weight"])
    return Layer(seen.moments.covariance, weight, torch.where(inside, local, -1))


def _filters(calibration: Calibration, group: Group) -> Tensor:
    """The weights that produce each channel (width, f), all producers side by side."""
    columns = []
    for site in calibration.structure.sites:
        if site.dim == 0 and site.tensor.removesuffix(".weight") in group.producers:
            weight = calibration.parameters[site.tensor].flatten(1) if site.tensor.endswith("weight") else None
            if weight is not None:
                rows = weight.new_zeros(group.width, weight.shape[1])
                inside = (site.channel_of >= group.start) & (site.channel_of < group.start + group.width)
                rows[(site.channel_of[inside] - group.start).to(weight.device)] = weight[inside.to(weight.device)]
                columns.append(rows)
    return torch.cat(columns, dim=1)


def _refit(calibration: Calibration, consumer: Consumer, keep: Tensor) -> tuple[dict[str, Tensor], Recovery]:
    seen = calibration.statistics[consumer.name]
    original = calibration.parameters[consumer.weight]
    covariance = seen.moments.covariance
    kept = calibration.structure.keep_indices(seen.channel_of.cpu(), keep).to(covariance.device)
    settings = calibration.settings
    fitted = refit(covariance, seen.as_features(original), kept, ridge=settings.ridge, name=consumer.name)
    if settings.rescale:
        fitted = rescale_variance(covariance, fitted)
    weight = seen.as_weight(fitted.weight, original)
    bias = _rebias(calibration, consumer, original.double() - weight, seen.mean)
    return {consumer.weight: weight.to(original.dtype), consumer.bias: bias.to(original.dtype)}, _recovery(fitted)


def _rebias(calibration: Calibration, consumer: Consumer, change: Tensor, mean: Tensor) -> Tensor:
    """b + mean^T (W - Ŵ): the output keeps its mean."""
    bias = calibration.parameters.get(consumer.bias)
    shift = change.flatten(1) @ mean
    return shift if bias is None else bias.double() + shift


def _recovery(fitted: Compensated) -> Recovery:
    return Recovery(fitted.relative_residual, fitted.ridge, fitted.condition)


def _check_mask(mask: Tensor, structure: Structure) -> None:
    for group in structure.groups:
        part = mask[group.channels]
        if bool((group.locked & ~part).any()):
            raise UsageError(
                f"{group.name}: {int((group.locked & ~part).sum())} channels to be pruned are locked: "
                f"{'; '.join(group.reasons)}."
            )
    for site in structure.sites:
        if not bool(structure.keep_indices(site.channel_of, mask).any()):
            raise UsageError(f"{site.tensor} would be left empty: keep at least one of its channels.")
