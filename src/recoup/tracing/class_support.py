"""Whether a model's own class can hold its channels at other sizes.

A cut copy of the model is captured again and compared, operation by operation and number by number, with the graph that
the cut ought to give. A size written into the forward code, or a slice that moves on to other channels, shows there,
even where the code would run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from recoup.channels.groups import Group, Structure, named_tensors
from recoup.errors import RecoupError, VerificationError
from recoup.graph.capture import Captured, capture, module_path
from recoup.graph.copies import working_copy
from recoup.graph.folding import FOLDED
from recoup.inputs.batches import Inputs
from recoup.operators.names import operation_name
from recoup.surgery.apply import apply, bare_plan, hollow
from recoup.surgery.resize import Resized, resize
from recoup.surgery.verify import verify

# Cuts to try: the first mostly changes every number there is; chunks and slices may fit it by chance.
CUTS = 3


def why_class_fails(
    model: nn.Module,
    sample: Inputs,
    captured: Captured,
    structure: Structure,
    layouts: Mapping[str, Any],
    folded: tuple[str, ...],
) -> str | None:
    """Why the model's class cannot hold what remains of its channels; None if it can."""
    if not structure.prunable:
        return None
    computed = [
        site.tensor for site in structure.sites if site.tensor in folded and _may_change(site.channel_of, structure)
    ]
    if computed:
        return f"{computed[0].removeprefix(FOLDED)} is computed from parameters, and the class would compute it again"
    ways = {node.name: layouts.get(node.name) for node in captured.graph.nodes}
    for keep, expected in telling_cuts(captured, structure, ways):
        if (found := _departure(model, sample, captured, structure, keep, expected)) is not None:
            return found
    return None


def why_not_by_hand(structure: Structure, by_hand: frozenset[str]) -> str | None:
    """The first weight that the code multiplies by in no layer, where that reads or makes channels that may go."""
    for product in structure.products:
        sites = [site.channel_of for site in structure.sites if site.tensor == product.weight]
        if product.node in by_hand and any(_may_change(channels, structure) for channels in sites):
            return (
                f"its code multiplies by {product.weight.removeprefix(FOLDED)} in no layer, where it cannot be refitted"
            )
    return None


def _departure(
    model: nn.Module, sample: Inputs, captured: Captured, structure: Structure, keep: Tensor, expected: Resized
) -> str | None:
    """Where the model's own code, with its tensors cut, departs from the graph it ought to run; None if nowhere."""
    if not expected.is_plain:
        return "its code moves channels in an order that a smaller network would have to change"
    try:
        actual = capture(hollow(model, structure.slices(keep)), sample, can_run=False)
    except RecoupError as error:
        return f"its code fixes a size ({str(error).splitlines()[0][:160]})"
    return difference(expected.graph, actual) or _other_constant(captured, actual)


def _other_constant(captured: Captured, actual: Captured) -> str | None:
    """The first constant that the code makes of a size, as torch.tensor(x.shape[1]) does; None if there is none."""
    before, after = ({c.tensors[name]: c.values[name] for name in c.values} for c in (captured, actual))
    for name in sorted(captured.constants):
        a, b = before[name], after.get(name)
        if b is None or a.shape != b.shape or not torch.allclose(a, b.to(a), rtol=0, atol=0, equal_nan=True):
            return f"its code makes a constant of a size ({name.removeprefix('constants.')})"
    return None


def telling_cuts(
    captured: Captured, structure: Structure, layouts: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Resized]]:
    """A few cuts under which every number of the graph changes that any of them changes; mostly the first will do."""
    seen: set[tuple[str, int]] = set()
    for number in range(CUTS):
        keep = sample_cut(structure, number)
        resized = resize(captured, layouts, keep)
        changed = _changed_numbers(captured, resized)
        if changed - seen or number == 0 or not resized.is_plain:
            yield keep, resized
        seen |= changed


def sample_cut(structure: Structure, number: int) -> Tensor:
    """A cut of every prunable group by a third, to an odd number if it can be: at random, in front, at the end."""
    generator = torch.Generator().manual_seed(0)
    keep = structure.keep_all()
    for group in structure.prunable:
        free = (~group.locked).nonzero().squeeze(1)
        count = max(1, len(free) // 3)
        if count < len(free) - 1 and (group.width - count) % 2 == 0:
            count += 1
        order = (
            torch.randperm(len(free), generator=generator),
            torch.arange(len(free)),
            torch.arange(len(free)).flip(0),
        )
        keep[group.start + free[order[number][:count]]] = False
    return structure.refill(keep, torch.arange(structure.width))


def _changed_numbers(captured: Captured, resized: Resized) -> set[tuple[str, int]]:
    """Places in the graph, as node names and positions, where a cut puts another number."""
    new = {node.meta["origin"]: node for node in resized.graph.nodes if "origin" in node.meta}
    found = set()
    for node in captured.graph.nodes:
        if node.op == "call_function" and node.name in new:
            pairs = zip(_flat((node.args, dict(node.kwargs))), _flat((new[node.name].args, {})), strict=False)
            found |= {(node.name, -1)} if node.target != new[node.name].target else set()
            found |= {(node.name, place) for place, (a, b) in enumerate(pairs) if type(a) is int and a != b}
    return found


def difference(expected: fx.Graph, actual: Captured) -> str | None:
    """The first operation in which two graphs differ, or None."""
    left, right = list(expected.nodes), list(actual.graph.nodes)
    if len(left) != len(right):
        return f"its code runs {len(right)} operations at another size, not {len(left)}"
    twin: dict[fx.Node, fx.Node] = dict(zip(left, right, strict=True))
    for a, b in twin.items():
        same = a.op == b.op and (a.op != "call_function" or a.target == b.target)
        if not same or not _same_arguments(a, b, twin):
            where = module_path(b) or "forward"
            return f"its code fixes a size or an order of channels ({operation_name(b.target)} in {where})"
    return None


def lock_what_breaks(
    model: nn.Module, structure: Structure, inputs: Inputs, captured: Captured, layouts: Mapping[str, Any]
) -> Structure:
    """Cut and compare: groups that the model's own code cannot hold at another size are locked."""
    ways = {node.name: layouts.get(node.name) for node in captured.graph.nodes}
    attempt = _Attempt(working_copy(model), structure, inputs, captured, ways)
    while structure.prunable and (culprits := attempt.culprits(structure.prunable)):
        reasons = {name: f"cutting it breaks the model's own code: {why}" for name, why in culprits.items()}
        structure = structure.lock(reasons)
        attempt = replace(attempt, structure=structure)
    return structure


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """What it takes to cut some groups and see what happens."""

    model: nn.Module
    structure: Structure
    inputs: Inputs
    captured: Captured
    layouts: Mapping[str, Any]

    def culprits(self, groups: tuple[Group, ...]) -> dict[str, str]:
        """The groups among these that cannot be cut, and why; all of them where only some together cannot."""
        failure = self._failure(groups)
        if failure is None or len(groups) == 1:
            return {} if failure is None else {groups[0].name: failure}
        middle = len(groups) // 2
        found = self.culprits(groups[:middle]) | self.culprits(groups[middle:])
        return found or dict.fromkeys((group.name for group in groups), failure)

    def _failure(self, groups: tuple[Group, ...]) -> str | None:
        """Why these groups cannot be cut, or None; tried with several cuts, as one may fit the code by chance."""
        for cut in (_random_half, _first, _last):
            keep = self.structure.keep_all()
            for group in groups:
                keep[group.start + cut((~group.locked).nonzero().squeeze(1))] = False
                keep = self.structure.refill(keep, torch.arange(group.start, group.start + group.width))
            try:
                if (found := self._departure(keep)) is not None:
                    return found
                plan = bare_plan(self.structure, named_tensors(self.model), keep)
                verify(self.model, plan, apply(self.model, plan), self.inputs)
            except VerificationError as error:
                return str(error).split("; it is not")[0]
        return None

    def _departure(self, keep: Tensor) -> str | None:
        expected = resize(self.captured, self.layouts, keep)
        return _departure(self.model, self.inputs, self.captured, self.structure, keep, expected)


def _random_half(free: Tensor) -> Tensor:
    return free[torch.randperm(len(free), generator=torch.Generator().manual_seed(0))[: max(1, len(free) // 2)]]


def _first(free: Tensor) -> Tensor:
    """An odd count, and every index behind it moves: what a slice or a chunk in the code does not follow."""
    return free[:1]


def _last(free: Tensor) -> Tensor:
    return free[-1:]


def _may_change(channel_of: Tensor, structure: Structure) -> bool:
    """Whether a tensor is cut, or refitted, when some group loses channels."""
    touched = torch.zeros(structure.width, dtype=torch.bool)
    touched[channel_of[channel_of >= 0]] = True
    return any(bool(touched[group.channels].any()) for group in structure.prunable)


def _same_arguments(a: fx.Node, b: fx.Node, twin: Mapping[fx.Node, fx.Node]) -> bool:
    left, right = _flat((a.args, dict(a.kwargs))), _flat((b.args, dict(b.kwargs)))
    return len(left) == len(right) and all(_same(x, y, twin) for x, y in zip(left, right, strict=True))


def _same(x: Any, y: Any, twin: Mapping[fx.Node, fx.Node]) -> bool:
    if isinstance(x, fx.Node):
        return twin.get(x) is y
    return type(x) is type(y) and bool(x == y)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for name in sorted(value) for item in (name, *_flat(value[name]))]
    if isinstance(value, (list, tuple)):
        return [len(value), *(item for part in value for item in _flat(part))]
    return [value]
