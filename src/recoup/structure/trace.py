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
    """Cut random halves and compare: groups that the model's own code cannot hold at another size are locked."""
    failure = _try(model, structure, structure.prunable, inputs)
    if failure is None:
        return structure
    culprits = {g.name: f for g in structure.prunable if (f := _try(model, structure, (g,), inputs)) is not None}
    return structure.lock({name: f"cutting it breaks the model's own code: {why}" for name, why in culprits.items()})


def _try(model: nn.Module, structure: Structure, groups: tuple[Group, ...], inputs: Inputs) -> str | None:
    keep = structure.keep_all()
    generator = torch.Generator().manual_seed(0)
    for group in groups:
        free = (~group.locked).nonzero().squeeze(1)
        gone = free[torch.randperm(len(free), generator=generator)[: max(1, len(free) // 2)]]
        keep[group.start + gone] = False
        keep = structure.refill(keep, torch.arange(group.start, group.start + group.width))
    try:
        prove(model, bare_plan(model, structure, keep), inputs)
    except VerificationError as error:
        return str(error).split("; it is not")[0]
    return None


def _all_following(structure: Structure, captured: Captured) -> dict[str, Following]:
    return {consumer.name: following(captured, consumer.node) for consumer in structure.consumers}
