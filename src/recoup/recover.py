"""Selection and compensation for whole networks: from a calibration to rankings, and from kept channels to a plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recoup.algebra.compensation import Compensated, rescale_variance
from recoup.algebra.compensation import compensate as refit
from recoup.algebra.selection import Layer, Problem, Ranking, Selector, rank
from recoup.calibrate import Calibration, Statistics
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
        weights, recovery = self._solutions(keep)
        return assemble(self._calibration, keep, weights, recovery)

    def weights(self, keep: Tensor) -> dict[str, Tensor]:
        """The refitted tensors alone, at their original size."""
        return self._solutions(keep)[0]

    def _solutions(self, keep: Tensor) -> tuple[dict[str, Tensor], dict[str, Recovery]]:
        structure = self._calibration.structure
        weights: dict[str, Tensor] = {}
        recovery: dict[str, Recovery] = {}
        for consumer in structure.consumers:
            kept_inputs = structure.keep_indices(consumer.inputs, keep)
            if not bool(kept_inputs.all()):
                layer, recovery[consumer.name] = self._solve(consumer, kept_inputs, keep)
                weights.update(layer)
        return weights, recovery

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


def assemble(
    calibration: Calibration, keep: Tensor, weights: Mapping[str, Tensor], recovery: Mapping[str, Recovery]
) -> Plan:
    """The plan that keeps `keep` and writes `weights`."""
    structure = calibration.structure
    slices = (*structure.slices(keep), *_slices_of_new_biases(structure, weights, keep))
    touched = {*weights, *(piece.tensor for piece in slices)}
    shapes = {name: structure.shapes[name] for name in sorted(touched) if name in structure.shapes}
    graph = calibration.traced.graph(keep, frozenset(weights))
    return Plan(structure.masks(keep), slices, weights, shapes, recovery, graph)


def _slices_of_new_biases(structure: Structure, weights: Mapping[str, Tensor], keep: Tensor) -> list[Slice]:
    """A bias that its layer did not have before loses the same outputs as the weight."""
    pairs = [(bias, consumer.outputs) for consumer in structure.consumers for bias in consumer.biases]
    new = {bias: outputs for bias, outputs in pairs if bias in weights and bias not in structure.shapes}
    masks = {bias: structure.keep_indices(outputs, keep) for bias, outputs in new.items()}
    return [Slice(bias, 0, mask.nonzero().squeeze(1)) for bias, mask in masks.items() if not bool(mask.all())]


def keep_mask(calibration: Calibration, keep: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A checked bool mask over all channels, from one or from masks by group (groups not named stay whole)."""
    structure = calibration.structure
    mask = structure.keep_all()
    if isinstance(keep, Tensor):
        mask = _checked_part(keep, structure.width, "the mask over all channels")
    else:
        known = {group.name: group for group in structure.groups}
        for name, part in keep.items():
            if name not in known:
                raise UsageError(f"there is no group {name!r}; the groups are {', '.join(known)}.")
            mask[known[name].channels] = _checked_part(part, known[name].width, name)
    _check_mask(mask, structure)
    return mask


def problem_of(calibration: Calibration, group: Group) -> Problem:
    """The group's question as algebra sees it."""
    layers = tuple(_layer(calibration, consumer, group) for consumer in calibration.structure.consumers_of(group))
    device = layers[0].covariance.device
    free = (~group.locked).to(device)
    settings = calibration.settings
    return Problem(group.width, layers, free, _filters(calibration, group).to(device), settings.ridge, settings.seed)


def _layer(calibration: Calibration, consumer: Consumer, group: Group) -> Layer:
    seen = calibration.statistics[consumer.name]
    local = seen.channel_of - group.start
    inside = (local >= 0) & (local < group.width)
    weight = seen.as_features(calibration.parameters[consumer.weight])
    return Layer(seen.covariance, weight, torch.where(inside, local, -1))


def _filters(calibration: Calibration, group: Group) -> Tensor:
    """The weights that produce each channel (width, f), all producers side by side."""
    structure = calibration.structure
    sites = {(site.tensor, site.dim): site.channel_of for site in structure.sites}
    makers = dict.fromkeys((p.weight, p.output_dim) for p in structure.products if p.input_dim is not None)
    columns = [_rows_of(group, calibration.parameters[w].movedim(dim, 0), sites[w, dim]) for w, dim in makers]
    found = [column for column in columns if column is not None]
    return torch.cat(found, dim=1) if found else torch.ones(group.width, 1)


def _rows_of(group: Group, weight: Tensor, channel_of: Tensor) -> Tensor | None:
    """Norms of what a weight holds for each channel of the group (width, f); None if it makes none of them.

    A channel that consists of several rows, such as a head, gets the root of their summed squares.
    """
    inside = (channel_of >= group.start) & (channel_of < group.start + group.width)
    if not bool(inside.any()):
        return None
    rows = weight.flatten(1)[inside.to(weight.device)].square()
    place = (channel_of[inside] - group.start).to(weight.device)
    return rows.new_zeros(group.width, rows.shape[1]).index_add_(0, place, rows).sqrt()


def _refit(calibration: Calibration, consumer: Consumer, keep: Tensor) -> tuple[dict[str, Tensor], Recovery]:
    seen = calibration.statistics[consumer.name]
    original = calibration.parameters[consumer.weight]
    covariance = seen.covariance
    kept = calibration.structure.keep_indices(seen.channel_of.cpu(), keep).to(covariance.device)
    settings = calibration.settings
    fitted = refit(covariance, seen.as_features(original), kept, ridge=settings.ridge, name=consumer.name)
    if settings.rescale:
        fitted = rescale_variance(covariance, fitted)
    weight = seen.as_weight(fitted.weight, original)
    lost = (original.double() - weight).movedim(seen.input_dim, 1).flatten(1)
    shift = lost @ seen.mean  # mean^T (W - Ŵ): every output keeps its mean
    biases = {name: _shifted(calibration.parameters.get(name), shift) for name in consumer.biases}
    written = {name: value.to(original.dtype) for name, value in {consumer.weight: weight, **biases}.items()}
    return written, _recovery(fitted, kept, seen)


def _shifted(bias: Tensor | None, shift: Tensor) -> Tensor:
    return shift if bias is None else bias.double() + shift


def _recovery(fitted: Compensated, kept: Tensor, seen: Statistics) -> Recovery:
    return Recovery(fitted.relative_residual, fitted.ridge, fitted.condition, int(kept.sum()), seen.moments.rows)


def _checked_part(mask: Tensor, width: int, name: str) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (width,):
        found = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(f"{name}: what to keep must be a bool tensor of {width} channels, got {found}.")
    return mask.cpu()


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
