"""From kept channels and refitted weights to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from recoup.channels.settling import centred, settled
from recoup.channels.structure import Structure
from recoup.errors import UsageError
from recoup.plan import Plan, Recovery, Slice
from recoup.statistics.calibrate import Calibration


def assemble(
    calibration: Calibration, keep: Tensor, weights: Mapping[str, Tensor], recovery: Mapping[str, Recovery]
) -> Plan:
    """The plan that keeps `keep` and writes `weights`."""
    structure = calibration.structure
    weights = settled(structure, calibration.parameters, weights, keep)
    slices = (*structure.slices(keep), *_slices_of_new_biases(structure, weights, keep))
    touched = {*weights, *(piece.tensor for piece in slices)}
    shapes = {name: structure.shapes[name] for name in sorted(touched) if name in structure.shapes}
    traced = calibration.traced
    plan = Plan(structure.masks(keep), slices, weights, shapes, recovery, traced.graph(keep, frozenset(weights)))
    given = traced.standalone.given
    return replace(
        plan,
        untied=given.untied,
        norms=given.norms,
        idle=traced.idle,
        keeps_hooks=given.keeps_hooks,
        centred=centred(structure, weights, keep),
        settings={**given.caches, **structure.settings(keep)} if plan.graph is None else {},
    )


def _slices_of_new_biases(structure: Structure, weights: Mapping[str, Tensor], keep: Tensor) -> list[Slice]:
    """A bias that its layer did not have before loses the same outputs as the weight."""
    pairs = [(bias, consumer.outputs) for consumer in structure.consumers for bias in consumer.biases]
    new = {bias: outputs for bias, outputs in pairs if bias in weights and bias not in structure.shapes}
    masks = {bias: structure.keep_indices(outputs, keep) for bias, outputs in new.items()}
    return [Slice(bias, 0, mask.nonzero().squeeze(1)) for bias, mask in masks.items() if not bool(mask.all())]


def keep_mask(structure: Structure, keep: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A checked bool mask over all channels, from one or from masks by group (groups not named stay whole)."""
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
        if len(set(counts := group.kept_by_part(part))) > 1:
            raise UsageError(
                f"{group.name}: a grouped convolution keeps its {group.step} parts apart, and each must keep as many "
                f"channels; the mask keeps {', '.join(map(str, counts))}."
            )
    for site in structure.sites:
        if not bool(structure.keep_indices(site.channel_of, mask).any()):
            raise UsageError(f"{site.tensor} would be left empty: keep at least one of its channels.")
