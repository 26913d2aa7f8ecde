"""Whether a model's own class can hold its channels at other sizes.

A cut copy of the model is captured again and compared, operation by operation and number by number, with the graph that
the cut ought to give. A size written into the forward code, or a slice that moves on to other channels, shows there,
even where the code would run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from recoup.channels.cost_model import channels_in
from recoup.channels.structure import Group, Structure, named_tensors
from recoup.errors import RecoupError, VerificationError
from recoup.graph.canonical import WithLayers
from recoup.graph.capture import Captured, capture, module_path
from recoup.graph.copies import working_copy
from recoup.graph.folding import FOLDED
from recoup.graph.one_sample import BatchCapture
from recoup.operators.names import operation_name
from recoup.surgery.apply import apply, bare_plan, hollow
from recoup.surgery.resize import Resized, resize
from recoup.surgery.verify import verify
from recoup.tracing.trials import TARGETS, sample_cut, trial_counts

# What is said of a group that is locked for the sake of the class.
BREAKS = "cutting it breaks the model's own code"
_Cut: TypeAlias = Callable[[Group, int], Tensor]
_Units: TypeAlias = tuple[tuple[Group, ...], ...]
_Test: TypeAlias = "Callable[[tuple[Group, ...]], _Departure | None]"


def why_class_fails(
    model: nn.Module,
    batch: BatchCapture,
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
    ways = {node.name: layouts.get(node.name) for node in batch.one.graph.nodes}
    for keep, expected in telling_cuts(batch.one, structure, ways):
        if (found := _departure(model, batch, structure, keep, expected)) is not None:
            return found.reason
    return None


def why_not_by_hand(structure: Structure, rewritten: WithLayers) -> str | None:
    """The first layer that is none in the model's code, where channels may go that it reads or makes."""
    for product in structure.products:
        sites = [site.channel_of for site in structure.sites if site.tensor == product.weight]
        if product.node in rewritten.nodes and any(_may_change(channels, structure) for channels in sites):
            name = product.weight.removeprefix(FOLDED)
            if product.weight in rewritten.weights:
                where = product.where or "forward"
                return f"its code runs over channels in {where} ({name}), where that cannot be refitted"
            return f"its code multiplies by {name} in no layer, where it cannot be refitted"
    return None


@dataclass(frozen=True, slots=True)
class _Departure:
    """Why the model's own code cannot hold a cut, and the module where that shows, if one is known."""

    reason: str
    where: str | None = None


def _departure(
    model: nn.Module, batch: BatchCapture, structure: Structure, keep: Tensor, expected: Resized
) -> _Departure | None:
    """Where the model's own code, with its tensors cut, departs from the graph it ought to run; None if nowhere."""
    if not expected.is_plain:
        return _Departure("its code moves channels in an order that a smaller network would have to change")
    ran = dict[str, None]()
    try:
        cut = hollow(model, structure.slices(keep), structure.settings(keep))
        actual = capture(cut, batch.samples.times(batch.count), can_run=False, ran=ran)
        batch.at_count(expected.graph)
    except RecoupError as error:
        reason = f"its code fixes a size ({str(error).splitlines()[0][:160]})"
        return _Departure(reason, _last_of_one_place(model, ran))
    other = _other_constant(batch.captured, actual)
    return difference(expected.graph, actual) or (None if other is None else _Departure(other))


def _last_of_one_place(model: nn.Module, ran: dict[str, None]) -> str | None:
    """The last module that ran of those that are at one place only: an activation may be the same in all layers."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return next((name for name in reversed(ran) if places[id(model.get_submodule(name))] == 1), None)


def runs_as_cut(model: nn.Module, batch: BatchCapture, structure: Structure, layouts: Mapping[str, Any]) -> bool:
    """Whether the model's own code, with all its groups cut, runs the graphs that this ought to give."""
    ways = {node.name: layouts.get(node.name) for node in batch.one.graph.nodes}
    cuts = telling_cuts(batch.one, structure, ways)
    return all(_departure(model, batch, structure, keep, expected) is None for keep, expected in cuts)


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
    """A few cuts under which every number of the graph changes that any of them changes; mostly the first will do.

    All of them where numbers of modules are to follow: one may fit a single cut by chance.
    """
    seen: set[tuple[str, int]] = set()
    for number in range(len(TARGETS)):
        keep = sample_cut(structure, number)
        resized = resize(captured, layouts, keep)
        changed = _changed_numbers(captured, resized)
        if changed - seen or number == 0 or not resized.is_plain or structure.numbers:
            yield keep, resized
        seen |= changed


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


def difference(expected: fx.Graph, actual: Captured) -> _Departure | None:
    """The first operation in which two graphs differ, or None."""
    left, right = list(expected.nodes), list(actual.graph.nodes)
    if len(left) != len(right):
        return _Departure(f"its code runs {len(right)} operations at another size, not {len(left)}")
    twin: dict[fx.Node, fx.Node] = dict(zip(left, right, strict=True))
    for a, b in twin.items():
        same = a.op == b.op and (a.op != "call_function" or a.target == b.target)
        if not same or not _same_arguments(a, b, twin):
            where = module_path(b) or "forward"
            what = f"its code fixes a size or an order of channels ({operation_name(b.target)} in {where})"
            return _Departure(what, module_path(b))
    return None


def lock_what_breaks(
    model: nn.Module, structure: Structure, batch: BatchCapture, layouts: Mapping[str, Any]
) -> Structure:
    """Cut and compare: groups that the model's own code cannot hold at another size are locked."""
    ways = {node.name: layouts.get(node.name) for node in batch.one.graph.nodes}
    attempt = _Attempt(working_copy(model), structure, batch, ways)
    while culprits := attempt.all_culprits():
        reasons = {name: f"{BREAKS}: {why}" for name, why in culprits.items()}
        attempt = replace(attempt, structure=attempt.structure.lock(reasons))
    return attempt.structure


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """What it takes to cut some groups and see what happens."""

    model: nn.Module
    structure: Structure
    batch: BatchCapture
    layouts: Mapping[str, Any]

    def all_culprits(self) -> dict[str, str]:
        """Some of the groups that cannot be cut, and why; none if all can, with several cuts, as one may fit by chance.

        The graphs of all cuts are compared before the first cut model is run, which takes longer.
        """
        tests = ((look, cut) for look in (self._look, self._run) for cut in (_at_random, _first, _last))
        found = (self._culprits(self.structure.units, partial(look, cut)) for look, cut in tests)
        return next((culprits for culprits in found if culprits), {})

    def _culprits(self, units: _Units, test: _Test) -> dict[str, str]:
        """Some of the groups among these that cannot be cut, and why; all of them where only some together cannot."""
        groups = tuple(chain(*units))
        failure = test(groups) if groups else None
        if failure is None:
            return {}
        for near in self._neighbourhoods(units, failure.where):
            if found := self._culprits(near, test):
                return found
        middle = len(units) // 2
        found = self._culprits(units[:middle], test) | self._culprits(units[middle:], test) if middle else {}
        return found or dict.fromkeys((group.name for group in groups), failure.reason)

    def _neighbourhoods(self, units: _Units, where: str | None) -> Iterator[_Units]:
        """Those met in a module, then those met in the modules around it, while they are fewer than half."""
        before = 0
        while where:
            near = self._near(units, where)
            if 2 * len(near) > len(units):
                return
            if len(near) > before:
                yield near
            before, where = len(near), where.rpartition(".")[0]

    def _near(self, units: _Units, where: str) -> _Units:
        """Those of which a module reads or makes channels: whoever breaks the code mostly meets it there."""
        calls = [node for node in self.batch.one.graph.nodes if node.op == "call_function"]
        inside = [node for node in calls if f"{module_path(node)}.".startswith(f"{where}.")]
        names = {value.name for node in inside for value in (node, *node.all_input_nodes)}
        met = [channels for name in names if (channels := channels_in(self.layouts[name])) is not None]
        seen = torch.zeros(self.structure.width + 1, dtype=torch.bool)  # the last is for what is no channel
        seen[torch.cat([*(channels.flatten() for channels in met), torch.tensor([-1])])] = True
        return tuple(unit for unit in units if any(bool(seen[group.channels].any()) for group in unit))

    def _keep(self, groups: tuple[Group, ...], cut: _Cut) -> Tensor:
        keep, counts = self.structure.keep_all(), trial_counts(self.structure)
        for group in groups:
            keep[group.start + cut(group, counts[group.name])] = False
            keep = self.structure.refill(keep, torch.arange(group.start, group.start + group.width))
        return keep

    def _look(self, cut: _Cut, groups: tuple[Group, ...]) -> _Departure | None:
        """Why these groups cannot be cut, by the graph of the cut model."""
        keep = self._keep(groups, cut)
        expected = resize(self.batch.one, self.layouts, keep)
        return _departure(self.model, self.batch, self.structure, keep, expected)

    def _run(self, cut: _Cut, groups: tuple[Group, ...]) -> _Departure | None:
        """The same by what the cut model computes."""
        plan = bare_plan(self.structure, named_tensors(self.model), self._keep(groups, cut))
        try:
            verify(self.model, plan, apply(self.model, plan), self.batch.samples.times(self.batch.count))
        except VerificationError as error:
            return _Departure(str(error).split("; it is not")[0])
        return None


def _at_random(group: Group, count: int) -> Tensor:
    order = torch.randperm(group.free, generator=torch.Generator().manual_seed(0))
    return group.free_in_turn(order)[:count]


def _first(group: Group, _: int) -> Tensor:
    """An odd count, and every index behind it moves: what a slice or a chunk in the code does not follow."""
    return group.free_in_turn()[: group.step]


def _last(group: Group, _: int) -> Tensor:
    return group.free_in_turn(torch.arange(group.free).flip(0))[: group.step]


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
