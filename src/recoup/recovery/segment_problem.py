"""The layers of a segment, cut to what is left of them, as parameters of a least-squares problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from recoup.algebra.gauss_newton import Linearised, Parameters
from recoup.algebra.moments import Accumulator
from recoup.algebra.patches import paired_rows
from recoup.algebra.whitening import Whitening, whitened_inputs, whitened_outputs
from recoup.graph.modes import exact_float32
from recoup.graph.runner import Watcher
from recoup.operators.record import operator_of, weights_of
from recoup.recovery.cut_graph import CutGraph, agree
from recoup.recovery.parts import Part
from recoup.recovery.residual import Residual, wide
from recoup.recovery.segments import Segment
from recoup.recovery.twin_run import SegmentBatch, TwinRun
from recoup.statistics.calibrate import most_inputs
from recoup.statistics.observe import readings

# Output positions per image from which the second moments of a layer's inputs are taken.
POSITIONS = 16


class SegmentProblem:
    """A segment as a function of changes to its parts; `tensors` has theirs, whole.

    Everything else stored that the segment reads is taken from the twin as it is now.
    """

    def __init__(
        self, cut_graph: CutGraph, twin: TwinRun, segment: Segment, parts: Sequence[Part], tensors: Mapping[str, Tensor]
    ) -> None:
        self._cut_graph, self._twin, self._segment, self._parts = cut_graph, twin, segment, parts
        self._whole = {name: tensors[name].detach() for part in parts for name in part.names}
        self._base = {name: cut_graph.tensor(name, value) for name, value in self._whole.items()}
        self._stored = cut_graph.tensors(segment, twin.stored)
        self._whitenings: tuple[Whitening | None, ...] = (None,) * len(parts)
        is_on_gpu = twin.device.type == "cuda"
        self._is_grouped = any(_is_grouped(node, depthwise_too=is_on_gpu) for node in segment.nodes)
        self._has_maps = any(_reads_maps(node) for node in segment.nodes) and not self._is_grouped

    def start(self) -> Parameters:
        """No change at all; changes have at least the precision of float32, whatever the tensors have."""
        return tuple(torch.zeros_like(wide(part.matrix(self._base))) for part in self._parts)

    def tensors(self, changes: Parameters) -> dict[str, Tensor]:
        """The whole tensors with these changes to what is left of them."""
        moved = self._moved(changes)
        return {name: self._cut_graph.restored(name, value, moved[name]) for name, value in self._whole.items()}

    def is_sound(self, batch: SegmentBatch) -> bool:
        """Whether the cut segment computes what the whole one does, up to rounding of float32 that is not shortened.

        And whether that has the shape of what should leave it: not so where samples were picked along another dim.
        Where it does not compute the same with the channels of maps last, they stay where they are.
        """
        entries = self._entries(batch)
        if not self._agrees(batch, entries):
            return False
        self._has_maps = self._has_maps and self._agrees(batch, self.laid_out(entries))
        return True

    def _agrees(self, batch: SegmentBatch, entries: Mapping[str, Any]) -> bool:
        try:
            with torch.no_grad(), exact_float32():
                whole = self._twin.run(self._segment, batch.entries, {})
                cut = self._run(entries, self._base)
        except (RuntimeError, IndexError):  # sizes or places do not follow samples or channels, or an order in memory
            return False
        wanted = {name: value.shape for name, value in batch.exits.items() if _is_real(value)}
        if not wanted or any(whole[name].shape != shape for name, shape in wanted.items()):
            return False
        return agree({name: self._cut_graph.value(name, value) for name, value in whole.items()}, cut)

    def laid_out(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Maps for convolutions with their channels last: these are faster so, forwards and backwards.

        Not so before grouped convolutions: cuDNN's kernel for the gradient of their weight writes out of bounds then
        (9.19, 31 groups of 4 channels; none of 420 sizes did with the channels first). Depthwise ones have other
        kernels, which are slower with the channels last: EfficientNet-Lite0 is recovered in 43 s so, and in 24 s with
        the channels first (one H200).
        """
        if self._has_maps or self._is_grouped:
            order = torch.channels_last if self._has_maps else torch.contiguous_format
            maps = {n: v.contiguous(memory_format=order) for n, v in values.items() if _is_real(v) and v.dim() == 4}
            return {**values, **maps}
        return dict(values)

    def has_gradient(self, batch: SegmentBatch) -> bool:
        """Whether autograd can tell how what leaves the segment depends on its parts."""
        changes = tuple(part.requires_grad_() for part in self.start())
        try:
            with torch.enable_grad():
                torch.autograd.grad(self.residual(batch)(changes).sum(), changes, allow_unused=True)
        except RuntimeError:  # an operation without a derivative
            return False
        return True

    def residual(self, batch: SegmentBatch) -> Residual:
        """What leaves the segment, less what should, relative to its spread: a function of the changes."""
        exits = {name: self._cut_graph.value(name, value) for name, value in batch.exits.items() if _is_real(value)}
        entries, targets = self.laid_out(self._entries(batch)), self.laid_out(exits)

        def run(changes: Parameters, watch: Watcher | None) -> dict[str, Any]:
            return self._run(entries, self._moved(changes), watch)

        return Residual(run, self._moves, targets)

    def outcomes(self, batch: SegmentBatch, changes: Parameters) -> tuple[list[Tensor], list[Tensor]]:
        """What should leave the segment, and what leaves it with these changes."""
        exits = self._run(self._entries(batch), self._moved(changes))
        names = [name for name, value in batch.exits.items() if _is_real(value)]
        return [self._cut_graph.value(name, batch.exits[name]) for name in names], [exits[name] for name in names]

    def whiten(self, segment_batches: Sequence[SegmentBatch], *, relative: bool = False) -> None:
        """From here on, take changes in units in which all directions count about alike, on these batches.

        `relative` ones are of the size of the tensors themselves, layer by layer.
        """
        inputs = self._whitened_inputs(segment_batches)
        ones = [torch.ones_like(matrix[:, :1]) for matrix in self.start()]
        self._whitenings = tuple(Whitening(*pair) for pair in zip(inputs, ones, strict=True))
        problem = Linearised([self.residual(segment_batches[0])], self.start())
        outputs = [whitened_outputs(gradients) for gradients in problem.pulled([_signs(r) for r in problem.residuals])]
        found = [Whitening(*pair) for pair in zip(inputs, outputs, strict=True)]
        if relative:
            sizes = [wide(part.matrix(self._base)) for part in self._parts]
            found = [whitening.relative_to(size) for whitening, size in zip(found, sizes, strict=True)]
        self._whitenings = tuple(found)

    def _whitened_inputs(self, segment_batches: Sequence[SegmentBatch]) -> list[Tensor | None]:
        wanted = {(part.node, part.weight): part for part in self._parts if self._is_plain(part)}
        sums: dict[tuple[str, str | None], Accumulator] = {}
        calls = {part.node for part in wanted.values()}
        generator = torch.Generator().manual_seed(0)

        def watch(node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
            keys = [(node.name, str(weight.target)) for weight in weights_of(node)] if node.name in calls else []
            for key, reading in zip(keys, readings(node.target, args, kwargs, result) if keys else (), strict=True):
                if key not in wanted:
                    continue
                made = reading.outputs(result)
                for rows, _ in paired_rows(reading.inputs, made, reading.window, POSITIONS, generator):
                    sums.setdefault(key, Accumulator(rows.shape[1], rows.device)).update(rows)

        with torch.no_grad():
            for batch in segment_batches:
                self._run(self._entries(batch), self._base, watch)
        found = {key: whitened_inputs(sums[key].moments(), part.bias is not None) for key, part in wanted.items()}
        like = wide(next(iter(self._base.values())))
        keys = ((part.node, part.weight) for part in self._parts)
        return [found[key].to(like) if key in found else None for key in keys]

    def _is_plain(self, part: Part) -> bool:
        """Whether every column but a bias' is an input that can be seen."""
        if part.weight is None or part.input_dim is None:
            return False
        kernel = self._base[part.weight].shape[2:].numel()
        return part.matrix(self._base).shape[1] <= most_inputs(kernel)

    def _entries(self, batch: SegmentBatch) -> dict[str, Any]:
        return {name: self._cut_graph.value(name, value) for name, value in batch.entries.items()}

    def _moves(self, changes: Parameters) -> dict[str, Tensor]:
        """What changes add to the cut tensors."""
        found: dict[str, Tensor] = {}
        for part, whitening, change in zip(self._parts, self._whitenings, changes, strict=True):
            changed = part.tensors(change if whitening is None else whitening(change), self._base)
            found |= {name: move.to(self._base[name].dtype) for name, move in changed.items()}
        return found

    def _moved(self, changes: Parameters) -> dict[str, Tensor]:
        moves = self._moves(changes)
        return {name: value + moves[name] for name, value in self._base.items()}

    def _run(
        self, entries: Mapping[str, Any], tensors: Mapping[str, Tensor], watch: Watcher | None = None
    ) -> dict[str, Any]:
        return self._cut_graph.run(self._segment, entries, {**self._stored, **tensors}, watch)


def _signs(like: Tensor) -> Tensor:
    """1 or -1 for every value, at random but always the same."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randint(2, like.shape, generator=generator, device=like.device).to(like) * 2 - 1


def _reads_maps(node: fx.Node) -> bool:
    """Whether a layer moves its window over two dims."""
    layer = operator_of(node.target).layer
    value = node.meta.get("val")
    return layer is not None and layer.has_window and not layer.transposed and getattr(value, "ndim", 4) == 4


def _is_grouped(node: fx.Node, *, depthwise_too: bool) -> bool:
    """Whether a convolution has several groups, of several channels each unless depthwise ones count too."""
    layer = operator_of(node.target).layer
    groups = layer.argument(node, "groups", 1) if layer is not None and layer.has_window else 1
    source: Any = node.args[0] if groups > 1 else None
    return source is not None and (depthwise_too or source.meta["val"].shape[1] > groups)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
