"""From a model and one batch to its structure: capture, walk, resolve, and probe that its class holds smaller sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recoup.batches import Inputs
from recoup.errors import VerificationError
from recoup.plan import Plan
from recoup.structure.blocks import residual_blocks
from recoup.structure.capture import Captured, capture
from recoup.structure.copying import working_copy
from recoup.structure.following import Following, following
from recoup.structure.groups import Group, Structure, resolve
from recoup.structure.surgery import zero_inputs
from recoup.structure.verify import prove
from recoup.structure.walk import walk


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A network's structure, what follows each consumer's output, and its residual blocks (names of groups)."""

    structure: Structure
    following: dict[str, Following]
    blocks: tuple[tuple[str, ...], ...]
    inputs: Inputs


def trace_inputs(model: nn.Module, inputs: Inputs) -> Traced:
    """The structure of `model`, with everything locked that it could not do without or that its code fixes."""
    captured = capture(model, inputs)
    structure = _probe(working_copy(model), resolve(walk(captured), model), inputs.first(1))
    return Traced(structure, _all_following(structure, captured), residual_blocks(structure, captured), inputs.first(1))


def bare_plan(model: nn.Module, structure: Structure, keep: Tensor) -> Plan:
    """The plan that keeps `keep` and refits nothing: pruned inputs are only cut off."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    slices = structure.slices(keep)
    weights = {
        consumer.weight: zero_inputs(parameters[consumer.weight], structure.keep_indices(consumer.inputs, keep))
        for consumer in structure.consumers
        if not bool(structure.keep_indices(consumer.inputs, keep).all())
    }
    shapes = {name: structure.shapes[name] for name in {*weights, *(piece.tensor for piece in slices)}}
    return Plan(structure.masks(keep), slices, weights, shapes)


def _probe(model: nn.Module, structure: Structure, inputs: Inputs) -> Structure:
    """Cut and compare: groups that the model's own code cannot hold at another size are locked."""
    while structure.prunable and (failure := _failure(model, structure, structure.prunable, inputs)) is not None:
        alone = {g.name: f for g in structure.prunable if (f := _failure(model, structure, (g,), inputs)) is not None}
        culprits = alone or dict.fromkeys((group.name for group in structure.prunable), failure)
        reasons = {name: f"cutting it breaks the model's own code: {why}" for name, why in culprits.items()}
        structure = structure.lock(reasons)
    return structure


def _failure(model: nn.Module, structure: Structure, groups: tuple[Group, ...], inputs: Inputs) -> str | None:
    """Why these groups cannot be cut, or None; tried with several cuts, as one may fit the code by chance."""
    for cut in (_random_half, _first, _last):
        keep = structure.keep_all()
        for group in groups:
            keep[group.start + cut((~group.locked).nonzero().squeeze(1))] = False
            keep = structure.refill(keep, torch.arange(group.start, group.start + group.width))
        try:
            prove(model, bare_plan(model, structure, keep), inputs)
        except VerificationError as error:
            return str(error).split("; it is not")[0]
    return None


def _random_half(free: Tensor) -> Tensor:
    return free[torch.randperm(len(free), generator=torch.Generator().manual_seed(0))[: max(1, len(free) // 2)]]


def _first(free: Tensor) -> Tensor:
    """An odd count, and every index behind it moves: what a slice or a chunk in the code does not follow."""
    return free[:1]


def _last(free: Tensor) -> Tensor:
    return free[-1:]


def _all_following(structure: Structure, captured: Captured) -> dict[str, Following]:
    return {consumer.name: following(captured, consumer.node) for consumer in structure.consumers}
