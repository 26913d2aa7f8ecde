"""A segment of the network at the size that is left, so that refitting it costs what running it will.

The graph of the smaller network has the same operations under the same names. Where it has not, or where the cut
segment does not compute what the whole one with zeros does, the segment is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from recoup.graph.copies import copied
from recoup.graph.purity import make_pure
from recoup.graph.runner import Watcher, run
from recoup.labels.layout import Layout
from recoup.operators.names import operation_name
from recoup.plan import GraphPlan, Slice
from recoup.recovery.segments import Segment
from recoup.statistics.calibrate import Calibration

# Relative difference that rounding may make between the cut segment and the whole one.
ROUNDING = 1e-3


class CutGraph:
    """Knows what a mask leaves of tensors and values, and the graph that runs on it."""

    def __init__(self, calibration: Calibration, keep: Tensor, written: Mapping[str, Tensor]) -> None:
        self._form, self._keep = calibration.traced.standalone, keep
        structure = calibration.structure
        biases = {name for consumer in structure.consumers for name in consumer.biases}
        plan = self._form.plan(keep, frozenset({*written, *biases}))
        self._plan: GraphPlan = plan
        graph, _ = copied(plan.graph)
        make_pure(graph)
        self._twins = {node.name: node for node in graph.nodes}
        self._slices: dict[str, list[Slice]] = {}
        for piece in structure.slices(keep):
            self._slices.setdefault(piece.tensor, []).append(piece)
        for consumer in structure.consumers:
            mask = structure.keep_indices(consumer.outputs, keep)
            for name in consumer.biases:
                if name not in structure.shapes and not bool(mask.all()):
                    self._slices.setdefault(name, [Slice(name, 0, mask.nonzero().squeeze(1))])

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """What is left of a parameter or buffer."""
        return functools.reduce(lambda left, piece: piece.of(left), self._slices.get(name, ()), value)

    def restored(self, name: str, value: Tensor, cut: Tensor) -> Tensor:
        """`value` with what is left of it replaced by `cut`."""
        places, factor = torch.arange(value.numel(), device=value.device).view(value.shape), 1.0
        for piece in self._slices.get(name, ()):
            places, factor = piece.places(places), factor * piece.factor
        whole = value.flatten().clone()
        whole[places.flatten()] = (cut / factor).to(value.dtype).flatten()
        return whole.view(value.shape)

    def value(self, name: str, value: Any) -> Any:
        """What is left of an activation."""
        layout = self._form.layouts.get(name)
        kept = layout.kept(self._keep) if isinstance(layout, Layout) else None
        if kept is None or not isinstance(value, Tensor):
            return value
        assert isinstance(layout, Layout) and layout.dim is not None
        return value.index_select(layout.dim, kept.to(value.device))

    def runs(self, segment: Segment) -> bool:
        """Whether the smaller graph has every operation of the segment."""
        return all(self._is_twin(node, self._twins.get(node.name)) for node in segment.nodes)

    def tensors(self, segment: Segment, stored: Callable[[str], Any]) -> dict[str, Any]:
        """What is left of everything stored that the cut segment reads, by name; `stored` has it whole."""
        read = [value for node in segment.nodes for value in self._twins[node.name].all_input_nodes]
        names = dict.fromkeys(str(value.target) for value in read if value.op == "get_attr")
        constants = self._plan.constants
        return {name: constants[name] if name in constants else self.tensor(name, stored(name)) for name in names}

    def run(
        self,
        segment: Segment,
        entries: Mapping[str, Any],
        tensors: Mapping[str, Any],
        watch: Watcher | None = None,
    ) -> dict[str, Any]:
        """What leaves the cut segment, with these cut `tensors`; `watch` sees every call."""
        twins = [self._twins[node.name] for node in segment.nodes]
        values = run(twins, entries, tensors.__getitem__, watch)
        return {name: values[name] for name in segment.exits}

    def _is_twin(self, node: fx.Node, twin: fx.Node | None) -> bool:
        if twin is None or operation_name(node.target) != operation_name(twin.target):
            return False
        left, right = ([_called(value) for value in side.all_input_nodes] for side in (node, twin))
        return [name for name in left if name in right] == right


def agree(whole: Mapping[str, Any], cut: Mapping[str, Any]) -> bool:
    """Whether two results of a segment are the same up to rounding."""
    pairs = [(whole[name], cut[name]) for name in cut if isinstance(cut[name], Tensor)]
    if any(a.shape != b.shape for a, b in pairs):
        return False
    return all(_are_close(a, b) for a, b in pairs if a.numel())


def _are_close(whole: Tensor, cut: Tensor) -> bool:
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(whole, cut)
    return float((whole - cut).abs().max()) <= ROUNDING * float(whole.abs().max())


def _called(node: fx.Node) -> str:
    """What an operand goes by in both graphs: a stored tensor by its own name."""
    return str(node.target) if node.op == "get_attr" else node.name
