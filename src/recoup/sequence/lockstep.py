"""Two passes over the same images, side by side: through the original network and through the one being pruned.

All batches move forward together from one layer to the next. At each stop it is known, for every image, what the layer
reads in the pruned network and what its output was in the original; its new weight is written, and on they go. Only the
values that later operations still need are kept, in memory up to a limit and beyond it on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from recoup.algebra.patches import Window
from recoup.batches import Inputs, tensors_in
from recoup.observe import layer_call, read_by
from recoup.sequence.parking import Parking, memory_of
from recoup.structure.route import Route, Stop, Stretch, drifting
from recoup.structure.standalone import Standalone, entering

Values: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One batch at a stop: what the layer reads in the pruned network, and the output it should have there.

    `outputs` is the original's output, `target` that plus what the skip has lost (the same where there is no skip).
    """

    inputs: Tensor
    window: Window | None
    outputs: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One batch in a stretch: what enters it in the pruned network, and what leaves it in the original."""

    entries: Mapping[str, Any]
    exits: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Number of samples: the length of the first exit that has one."""
        return next((len(value) for value in self.exits.values() if isinstance(value, Tensor) and value.dim()), 1)

    def pick(self, samples: Tensor) -> Passage:
        """Only these samples (k,)."""
        size = self.size
        return Passage(*({n: _part(v, samples, size) for n, v in side.items()} for side in (self.entries, self.exits)))

    def split(self, step: int) -> Iterator[Passage]:
        """The same samples, up to `step` at a time."""
        size = self.size
        for start in range(0, size, step):
            part = slice(start, start + step)
            yield Passage(*({n: _part(v, part, size) for n, v in side.items()} for side in (self.entries, self.exits)))


@dataclass(slots=True)
class _Batch:
    """Values that are still needed; those of the pruned pass only where they differ."""

    original: Values
    pruned: Values = field(default_factory=dict)


class Lockstep:
    """A walk of all batches along a route; `written` are tensors that differ in the pruned network from the start."""

    def __init__(
        self,
        host: Standalone,
        route: Route,
        batches: Sequence[Inputs],
        written: Mapping[str, Tensor],
        device: torch.device,
        *,
        stretches: Sequence[Stretch] = (),
        memory: int | None = None,
    ) -> None:
        """What enters one of the `stretches` is kept until its end, so that it can be run again.

        At most `memory` bytes of activations wait in memory, the rest in files; by default what `memory_of` says.
        """
        self._host, self._route, self.device = host, route, device
        self._stored = {node: _attribute(host, str(node.target)) for node in route.nodes if node.op == "get_attr"}
        self._by_target = {str(node.target): value for node, value in self._stored.items()}
        self._written = dict(written)
        changing = {*written, *(name for stretch in stretches for name in stretch.tensors)}
        self._drifts = drifting(route, changing) if route.is_pure else _everything(route)
        self._last_uses: dict[str, list[str]] = {}
        for value, reader in route.last_uses(stretches).items():
            self._last_uses.setdefault(reader, []).append(value)
        self._by_name = {node.name: node for node in route.nodes}
        limit = memory_of(device) if memory is None else memory
        self._parking, self._count, self._at = Parking(limit), len(batches), 0
        for place, inputs in enumerate(batches):
            self._put(place, self._start(inputs.to(device)))

    @property
    def peak(self) -> int:
        """The most bytes of waiting activations that were in memory at once."""
        return self._parking.peak

    def drifts(self, stop: Stop) -> bool:
        """Whether anything the stop's layer reads or is added to has changed on the way."""
        read = [value.name for value in self._by_name[stop.node].all_input_nodes if value.op != "get_attr"]
        return any(name in self._drifts for name in (*read, stop.skip))

    def visit(self, stop: Stop, places: Sequence[int]) -> Iterator[Reading]:
        """What the layer meets in the batches at these places; may be asked for again as long as nobody moves on."""
        self._move_to(self._position(stop.node))
        for place in places:
            with self._borrowed(place) as batch:
                yield self._reading(stop, batch)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors of the pruned network from here on."""
        self._written.update(tensors)

    def stored(self, name: str) -> Any:
        """A tensor of the pruned network as it is now, by name."""
        return self._written.get(name, self._by_target.get(name))

    def passages(self, stretch: Stretch, places: Sequence[int]) -> Iterator[Passage]:
        """What enters and should leave a stretch in the batches at these places, which have come to its end."""
        self._move_to(stretch.end)
        for place in places:
            with self._borrowed(place) as batch:
                yield Passage(self._entries(stretch, batch), {name: batch.original[name] for name in stretch.exits})

    def run(self, stretch: Stretch, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What leaves a stretch of the pruned network with other `tensors`."""
        values = self._values(stretch, entries, tensors)
        return {name: values[name] for name in stretch.exits}

    def _values(self, stretch: Stretch, entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Values:
        values = dict(entries)

        def look(node: fx.Node) -> Any:
            if node.op == "get_attr":
                name = str(node.target)
                return tensors[name] if name in tensors else self._written.get(name, self._stored[node])
            return values[node.name]

        for node in stretch.nodes:
            values[node.name] = _call(node, look)
        return values

    def bearable(self, stretch: Stretch, limit: int) -> int:
        """How many samples at a time keep the activations of a stretch, and their derivatives, within so many bytes."""
        return _fitting(limit, COPIES, stretch.nodes)

    def storable(self, stretch: Stretch, limit: int) -> int:
        """How many samples keep what enters and leaves a stretch, whole and cut, within so many bytes."""
        return _fitting(limit, 2, [self._by_name[name] for name in (*stretch.entries, *stretch.exits)])

    def rewrite(self, stretch: Stretch, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of a stretch that all batches have just passed, and let them pass it again."""
        self.write(tensors)
        self._move_to(stretch.end)
        for place in range(self._count):
            with self._borrowed(place) as batch:
                values = self._values(stretch, self._entries(stretch, batch), {})
                # Besides what leaves the stretch, what enters the next one where the two overlap.
                batch.pruned |= {node.name: values[node.name] for node in stretch.nodes if node.name in batch.original}

    def outputs(self, places: Sequence[int]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """What both networks return for the batches at these places, the original's first; the end of the walk."""
        last = len(self._route.nodes) - 1
        self._move_to(last)
        (result,) = self._route.nodes[last].args
        for place in places:
            with self._borrowed(place) as batch:
                values = [tensors_in(fx.node.map_arg(result, look)) for look in self._lookups(batch)]
                yield values[0], values[1]

    def close(self) -> None:
        """Give the memory back."""
        self._parking.close()

    def entering(self, inputs: Inputs) -> Values:
        """The arguments of the network by the names they have in its graph."""
        return entering(self._host, inputs.args, inputs.kwargs)

    def _start(self, inputs: Inputs) -> _Batch:
        batch = _Batch(self.entering(inputs))
        if not self._route.is_pure:
            batch.pruned = {name: _cloned(value) for name, value in batch.original.items()}
        return batch

    @contextmanager
    def _borrowed(self, place: int) -> Iterator[_Batch]:
        batch = _Batch(*self._parking.take(place))
        try:
            yield batch
        finally:
            self._put(place, batch)

    def _entries(self, stretch: Stretch, batch: _Batch) -> dict[str, Any]:
        _, pruned = self._lookups(batch)
        return {name: pruned(self._by_name[name]) for name in stretch.entries}

    def _put(self, place: int, batch: _Batch) -> None:
        self._parking.put(place, (batch.original, batch.pruned))

    def _position(self, name: str) -> int:
        return self._route.nodes.index(self._by_name[name])

    def _move_to(self, position: int) -> None:
        """Run every batch up to, and not including, the node at `position`."""
        if position == self._at:
            return
        for place in range(self._count):
            with self._borrowed(place) as batch:
                for node in self._route.nodes[self._at : position]:
                    self._run(node, batch)
        self._at = position

    def _run(self, node: fx.Node, batch: _Batch) -> None:
        if node.op == "call_function":
            original, pruned = self._lookups(batch)
            batch.original[node.name] = _call(node, original)
            if node.name in self._drifts:
                batch.pruned[node.name] = _call(node, pruned)
        for value in self._last_uses.get(node.name, ()):
            batch.original.pop(value, None)
            batch.pruned.pop(value, None)

    def _lookups(self, batch: _Batch) -> tuple[Callable[[fx.Node], Any], Callable[[fx.Node], Any]]:
        def original(node: fx.Node) -> Any:
            return self._stored[node] if node.op == "get_attr" else batch.original[node.name]

        def pruned(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return self._written.get(str(node.target), self._stored[node])
            return batch.pruned[node.name] if node.name in batch.pruned else batch.original[node.name]

        return original, pruned

    def _reading(self, stop: Stop, batch: _Batch) -> Reading:
        node = self._by_name[stop.node]
        original, pruned = self._lookups(batch)
        outputs = _call(node, original)
        call = layer_call(node.target, fx.node.map_arg(node.args, pruned), fx.node.map_arg(node.kwargs, pruned))
        inputs, window = read_by(node.target, call)
        return Reading(inputs, window, outputs, outputs + self._lost(stop, original, pruned, outputs))

    def _lost(self, stop: Stop, original: Any, pruned: Any, outputs: Tensor) -> Tensor:
        """What the layer has to add to its output to make up for its skip; outputs that cannot reach it add nothing."""
        if stop.skip is None:
            return outputs.new_zeros(())
        scale = stop.scale({str(node.target): value for node, value in self._stored.items()}, outputs)
        if scale is None:
            return outputs.new_zeros(())
        skip = self._by_name[stop.skip]
        reached = scale.abs() > REACHED * scale.abs().max()
        return torch.where(reached, (original(skip) - pruned(skip)) / torch.where(reached, scale, 1.0), 0.0)


# Values, derivatives along a direction and gradients, with what autograd keeps of them.
COPIES = 4
# An output scaled down to less than this share of the most scaled one is not used to correct a skip.
REACHED = 1e-3


def _fitting(limit: int, copies: int, nodes: Sequence[fx.Node]) -> int:
    values = [value for node in nodes for value in tensors_in(node.meta.get("val"))]
    return max(1, limit // max(1, copies * sum(value.numel() * value.element_size() for value in values)))


def _call(node: fx.Node, look: Callable[[fx.Node], Any]) -> Any:
    args, kwargs = fx.node.map_arg(node.args, look), fx.node.map_arg(node.kwargs, look)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # the target of a call_function


def _attribute(host: Standalone, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    value = getattr(host.get_submodule(owner), attribute)
    return value.detach() if isinstance(value, Tensor) else value


def _part(value: Any, part: slice | Tensor, size: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or len(value) != size:
        return value
    return value[part.to(value.device) if isinstance(part, Tensor) else part]


def _everything(route: Route) -> frozenset[str]:
    return frozenset(node.name for node in route.nodes)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
