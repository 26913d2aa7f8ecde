"""Two passes over the same images, side by side: through the original network and through the one being pruned.

All batches move forward together from one layer to the next. At each point it is known, for every image, what the layer
reads in the pruned network and what its output was in the original; its new weight is written, and on they go. Only the
values that later operations still need are kept, in memory up to a limit and beyond it on disk.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from recoup.algebra.patches import Window
from recoup.graph.runner import Look, arguments, call, grouped, lookup, run
from recoup.graph.standalone import Standalone, entering
from recoup.inputs.batches import Inputs, tensors_in
from recoup.operators.record import Reading, weights_of
from recoup.recovery.activation_store import ActivationStore, resident_of, size_of
from recoup.recovery.schedule import RefitPoint, Schedule, drifting
from recoup.recovery.segments import Segment, last_needs
from recoup.statistics.observe import readings

Values: TypeAlias = dict[str, Any]

# Values, derivatives along a direction and gradients, with what autograd keeps of them.
COPIES = 4
# An output scaled down to less than this share of the most scaled one is not used to correct a skip.
REACHED = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class RefitBatch:
    """One batch at a point: what the layer reads in the pruned network, and the output it should have there.

    `outputs` is the original's output, `target` that plus what the skip has lost (the same where there is no skip).
    """

    inputs: Tensor
    window: Window | None
    outputs: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SegmentBatch:
    """One batch in a segment: what enters it in the pruned network, and what leaves it in the original."""

    entries: Mapping[str, Any]
    exits: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Number of samples: the length of the first exit that has one."""
        return next((len(value) for value in self.exits.values() if isinstance(value, Tensor) and value.dim()), 1)

    def pick(self, samples: Tensor) -> SegmentBatch:
        """Only these samples (k,)."""
        size = self.size
        return SegmentBatch(
            *({n: _part(v, samples, size) for n, v in side.items()} for side in (self.entries, self.exits))
        )

    def split(self, step: int) -> Iterator[SegmentBatch]:
        """The same samples, up to `step` at a time."""
        size = self.size
        for start in range(0, size, step):
            part = slice(start, start + step)
            yield SegmentBatch(
                *({n: _part(v, part, size) for n, v in side.items()} for side in (self.entries, self.exits))
            )


@dataclass(slots=True)
class _TwinValues:
    """Values that are still needed; those of the pruned pass only where they differ."""

    original: Values
    pruned: Values = field(default_factory=dict)


class TwinRun:
    """All batches on their way along a schedule; `written` are tensors that differ in the pruned network."""

    def __init__(
        self,
        host: Standalone,
        schedule: Schedule,
        batches: Sequence[Inputs],
        written: Mapping[str, Tensor],
        device: torch.device,
        *,
        segments: Sequence[Segment] = (),
        memory: int | None = None,
    ) -> None:
        """What enters one of the `segments` is kept until its end, so that it can be run again.

        At most `memory` bytes of activations wait in memory, the rest in files; by default what `resident_of` says.
        """
        self._host, self._schedule, self.device = host, schedule, device
        names = [str(node.target) for node in schedule.nodes if node.op == "get_attr"]
        self._stored = {name: _attribute(host, name) for name in names}
        self._written = dict(written)
        changing = {*written, *(name for segment in segments for name in segment.tensors)}
        self._drifts = drifting(schedule, changing) if schedule.is_pure else _everything(schedule)
        self._last_needs = grouped(last_needs(schedule, segments))
        self._by_name = {node.name: node for node in schedule.nodes}
        self._positions = {node.name: number for number, node in enumerate(schedule.nodes)}
        limit = resident_of(device) if memory is None else memory
        self._store, self._reached = ActivationStore(limit), [0] * len(batches)
        self._samples, self._first_samples = sum(batch.size for batch in batches), batches[0].size if batches else 1
        for place, inputs in enumerate(batches):
            self._put(place, self._start(inputs.to(device)))

    @property
    def peak(self) -> int:
        """The most bytes of waiting activations that were in memory at once."""
        return self._store.peak

    def drifts(self, point: RefitPoint) -> bool:
        """Whether anything the point's layer reads or is added to has changed on the way."""
        read = [value.name for value in self._by_name[point.node].all_input_nodes if value.op != "get_attr"]
        return any(name in self._drifts for name in (*read, point.skip))

    def visit(self, point: RefitPoint, places: Sequence[int]) -> Iterator[RefitBatch]:
        """What the layer meets in the batches at these places; may be asked for again as long as nobody moves on."""
        self._move_to(self._positions[point.node])
        for place in places:
            with self._borrowed(place) as batch:
                found = self._refit_batch(point, batch)
            yield found  # nothing is borrowed meanwhile: whoever reads may never come back

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors of the pruned network from here on."""
        self._written.update(tensors)

    def stored(self, name: str) -> Any:
        """A tensor of the pruned network as it is now, by name."""
        return self._written.get(name, self._stored.get(name))

    def segment_batches(self, segment: Segment, places: Sequence[int]) -> Iterator[SegmentBatch]:
        """What enters and should leave a segment in the batches at these places, which have come to its end."""
        self._move_to(segment.end)
        for place in places:
            with self._borrowed(place) as batch:
                found = SegmentBatch(
                    self._entries(segment, batch), {name: batch.original[name] for name in segment.exits}
                )
            yield found

    def run(self, segment: Segment, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What leaves a segment of the pruned network with other `tensors`."""
        values = self._values(segment, entries, tensors)
        return {name: values[name] for name in segment.exits}

    def _values(self, segment: Segment, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Values:
        def stored(name: str) -> Any:
            return tensors[name] if name in tensors else self.stored(name)

        return run(segment.nodes, entries, stored)

    def can_be_parted(self, batch: SegmentBatch) -> bool:
        """Whether what enters has a row per sample, or nothing of samples: not so with several rows for each.

        A list of places of all samples would point to those that are gone: on a GPU that is the end of the process.
        """
        size, rows = batch.size, {name: _rows(value) for name, value in batch.entries.items()}
        each = {name: _rows(self._by_name[name].meta.get("val")) for name in rows}
        return size == 1 or not any(rows[name] == size * each[name] > size for name in rows)

    def bearable(self, segment: Segment, limit: int) -> int:
        """How many samples at a time keep the activations of a segment, and their derivatives, within so many bytes."""
        return _fitting(limit, COPIES, segment.nodes)

    def storable(self, segment: Segment, limit: int) -> int:
        """How many samples keep what enters and leaves a segment, whole and cut, within so many bytes."""
        return _fitting(limit, 2, [self._by_name[name] for name in (*segment.entries, *segment.exits)])

    def rewrite(self, segment: Segment, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of a segment that all batches have just passed, and let them pass it again."""
        self.write(tensors)
        self._move_to(segment.end)
        for place in range(len(self._reached)):
            with self._borrowed(place) as batch:
                values = self._values(segment, self._entries(segment, batch), {})
                # Besides what leaves the segment, what enters the next one where the two overlap.
                batch.pruned |= {node.name: values[node.name] for node in segment.nodes if node.name in batch.original}

    def outputs(self, places: Sequence[int]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """What both networks return for the batches at these places, the original's first; the end of the schedule."""
        last = len(self._schedule.nodes) - 1
        self._move_to(last)
        (result,) = self._schedule.nodes[last].args
        for place in places:
            with self._borrowed(place) as batch:
                original, pruned = (tensors_in(fx.node.map_arg(result, look)) for look in self._lookups(batch))
            yield original, pruned

    def close(self) -> None:
        """Give the memory back."""
        self._store.close()

    def entering(self, inputs: Inputs) -> Values:
        """The arguments of the network by the names they have in its graph."""
        return entering(self._host, inputs.args, inputs.kwargs)

    def _start(self, inputs: Inputs) -> _TwinValues:
        batch = _TwinValues(self.entering(inputs))
        if not self._schedule.is_pure:
            batch.pruned = {name: _cloned(value) for name, value in batch.original.items()}
        return batch

    @contextmanager
    def _borrowed(self, place: int) -> Iterator[_TwinValues]:
        batch = _TwinValues(*self._store.take(place))
        try:
            yield batch
        finally:
            self._put(place, batch)

    def _entries(self, segment: Segment, batch: _TwinValues) -> dict[str, Any]:
        _, pruned = self._lookups(batch)
        return {name: pruned(self._by_name[name]) for name in segment.entries}

    def _put(self, place: int, batch: _TwinValues) -> None:
        self._store.put(place, (batch.original, batch.pruned))

    def _move_to(self, position: int) -> None:
        """Run every batch up to, and not including, the node at `position`; one that fails goes on where it was."""
        for place, at in enumerate(self._reached):
            if at >= position:
                continue
            with self._borrowed(place) as batch:
                for number in range(at, position):
                    self._run(self._schedule.nodes[number], batch)
                    self._reached[place] = number + 1
                if place == 0:
                    self._require_room(batch)

    def _require_room(self, first: _TwinValues) -> None:
        """Refuse to go on where all batches, if they need what the first one does, have no room to wait in."""
        self._store.require(size_of((first.original, first.pruned)) * self._samples // self._first_samples)

    def _run(self, node: fx.Node, batch: _TwinValues) -> None:
        if node.op == "call_function":
            original, pruned = self._lookups(batch)
            if node.name not in batch.original:
                batch.original[node.name] = call(node, original)
            if node.name in self._drifts:
                batch.pruned[node.name] = call(node, pruned)
        for value in self._last_needs.get(node.name, ()):
            batch.original.pop(value, None)
            batch.pruned.pop(value, None)

    def _lookups(self, batch: _TwinValues) -> tuple[Look, Look]:
        values = ChainMap(batch.pruned, batch.original)
        return lookup(batch.original, self._stored.__getitem__), lookup(values, self.stored)

    def _refit_batch(self, point: RefitPoint, batch: _TwinValues) -> RefitBatch:
        node = self._by_name[point.node]
        original, pruned = self._lookups(batch)
        result = batch.original.get(node.name)
        if result is None:
            result = call(node, original)
            if self._schedule.is_pure:  # nobody writes into it: whoever moves on need not compute it again
                batch.original[node.name] = result
        seen = self._reading(point, node, original, result)
        found = self._reading(point, node, pruned, call(node, pruned) if seen.is_part else None)
        outputs = seen.outputs(result)
        return RefitBatch(found.inputs, found.window, outputs, outputs + self._lost(point, original, pruned, outputs))

    def _reading(self, point: RefitPoint, node: fx.Node, look: Look, result: Any) -> Reading:
        """What the point's layer reads, among all that a call reads."""
        place = [weight.target for weight in weights_of(node)].index(point.consumer.weight)
        return next(islice(readings(node.target, *arguments(node, look), result), place, None))

    def _lost(self, point: RefitPoint, original: Any, pruned: Any, outputs: Tensor) -> Tensor:
        """What the layer has to add to its output to make up for its skip; outputs that cannot reach it add nothing."""
        if point.skip is None:
            return outputs.new_zeros(())
        scale = point.scale(self._stored, outputs)
        if scale is None:
            return outputs.new_zeros(())
        skip = self._by_name[point.skip]
        reached = scale.abs() > REACHED * scale.abs().max()
        return torch.where(reached, (original(skip) - pruned(skip)) / torch.where(reached, scale, 1.0), 0.0)


def _fitting(limit: int, copies: int, nodes: Sequence[fx.Node]) -> int:
    values = [value for node in nodes for value in tensors_in(node.meta.get("val"))]
    return max(1, limit // max(1, copies * sum(value.numel() * value.element_size() for value in values)))


def _attribute(host: Standalone, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    value = getattr(host.get_submodule(owner), attribute)
    return value.detach() if isinstance(value, Tensor) else value


def _part(value: Any, part: slice | Tensor, size: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
        return value
    return value[part.to(value.device) if isinstance(part, Tensor) else part]


def _rows(value: Any) -> int:
    """The length of a tensor; of one without dims, and of anything else, 0."""
    return len(value) if isinstance(value, Tensor) and value.dim() else 0


def _everything(schedule: Schedule) -> frozenset[str]:
    return frozenset(node.name for node in schedule.nodes)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
