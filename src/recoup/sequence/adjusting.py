"""The layers of a stretch, cut to what is left of them, as parameters of a least-squares problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from recoup.algebra.gauss_newton import Linearised, Parameters
from recoup.algebra.moments import Accumulator
from recoup.algebra.patches import paired_rows
from recoup.algebra.whitening import Whitening, whitened_inputs, whitened_outputs
from recoup.calibrate import MOST_INPUTS
from recoup.observe import layer_call, read_by
from recoup.sequence.cutting import Cutter, Watcher, agree
from recoup.sequence.lockstep import Lockstep, Passage
from recoup.sequence.residual import Residual, wide
from recoup.structure.copying import exact_float32
from recoup.structure.operations import operation_name
from recoup.structure.route import Stretch

# Output positions per image from which the second moments of a layer's inputs are taken.
POSITIONS = 16


@dataclass(frozen=True, slots=True)
class Part:
    """What may change of one layer: its `node`, and the weight and bias that nobody else uses, by name.

    As a matrix the outputs are its rows; `input_dim` is the weight's dim along the columns, None for a grouped one.
    """

    node: str
    weight: str | None
    bias: str | None
    input_dim: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight and, as the last column, the bias."""
        columns = [self._turned(tensors[self.weight]).flatten(1)] if self.weight is not None else []
        columns += [tensors[self.bias][:, None]] if self.bias is not None else []
        return torch.cat(columns, dim=1)

    def tensors(self, matrix: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weight and bias from such a matrix."""
        found = {}
        if self.weight is not None:
            turned = self._turned(like[self.weight])
            columns = matrix[:, : turned[0].numel()].reshape(turned.shape)
            found[self.weight] = columns.movedim(1, self._dim)
        if self.bias is not None:
            found[self.bias] = matrix[:, -1]
        return found

    @property
    def _dim(self) -> int:
        return 1 if self.input_dim is None else self.input_dim

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.movedim(self._dim, 1)


class Adjustable:
    """A stretch as a function of changes to its parts; `tensors` has theirs, whole.

    Everything else stored that the stretch reads is taken from the walk as it is now.
    """

    def __init__(
        self, cutter: Cutter, walk: Lockstep, stretch: Stretch, parts: Sequence[Part], tensors: Mapping[str, Tensor]
    ) -> None:
        self._cutter, self._walk, self._stretch, self._parts = cutter, walk, stretch, parts
        self._whole = {name: tensors[name].detach() for part in parts for name in part.names}
        self._base = {name: cutter.tensor(name, value) for name, value in self._whole.items()}
        self._stored = cutter.tensors(stretch, walk.stored)
        self._whitenings: tuple[Whitening | None, ...] = (None,) * len(parts)
        self._has_maps = any(operation_name(node.target) == "conv2d" for node in stretch.nodes)

    def start(self) -> Parameters:
        """No change at all; changes have at least the precision of float32, whatever the tensors have."""
        return tuple(torch.zeros_like(wide(part.matrix(self._base))) for part in self._parts)

    def tensors(self, changes: Parameters) -> dict[str, Tensor]:
        """The whole tensors with these changes to what is left of them."""
        moved = self._moved(changes)
        return {name: self._cutter.restored(name, value, moved[name]) for name, value in self._whole.items()}

    def is_sound(self, passage: Passage) -> bool:
        """Whether the cut stretch computes what the whole one does, up to rounding of float32 that is not shortened.

        And whether that has the shape of what should leave it: not so where samples were picked along another dim.
        Where it does not compute the same with the channels of maps last, they stay where they are.
        """
        entries = self._entries(passage)
        if not self._agrees(passage, entries):
            return False
        self._has_maps = self._has_maps and self._agrees(passage, self.laid_out(entries))
        return True

    def _agrees(self, passage: Passage, entries: Mapping[str, Any]) -> bool:
        try:
            with torch.no_grad(), exact_float32():
                whole = self._walk.run(self._stretch, passage.entries, {})
                cut = self._run(entries, self._base)
        except RuntimeError:  # a size that does not follow the samples or the channels, or an order in memory
            return False
        wanted = {name: value.shape for name, value in passage.exits.items() if _is_real(value)}
        if not wanted or any(whole[name].shape != shape for name, shape in wanted.items()):
            return False
        return agree({name: self._cutter.value(name, value) for name, value in whole.items()}, cut)

    def laid_out(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Maps for convolutions with their channels last: these are faster so, forwards and backwards."""
        maps = {n: v for n, v in values.items() if self._has_maps and _is_real(v) and v.dim() == 4}
        return {**values, **{n: v.contiguous(memory_format=torch.channels_last) for n, v in maps.items()}}

    def has_gradient(self, passage: Passage) -> bool:
        """Whether autograd can tell how what leaves the stretch depends on its parts."""
        changes = tuple(part.requires_grad_() for part in self.start())
        try:
            with torch.enable_grad():
                torch.autograd.grad(self.residual(passage)(changes).sum(), changes, allow_unused=True)
        except RuntimeError:  # an operation without a derivative
            return False
        return True

    def residual(self, passage: Passage) -> Residual:
        """What leaves the stretch, less what should, relative to its spread: a function of the changes."""
        exits = {name: self._cutter.value(name, value) for name, value in passage.exits.items() if _is_real(value)}
        entries, targets = self.laid_out(self._entries(passage)), self.laid_out(exits)

        def run(changes: Parameters, watch: Watcher | None) -> dict[str, Any]:
            return self._run(entries, self._moved(changes), watch)

        return Residual(run, self._moves, targets)

    def outcomes(self, passage: Passage, changes: Parameters) -> tuple[list[Tensor], list[Tensor]]:
        """What should leave the stretch, and what leaves it with these changes."""
        exits = self._run(self._entries(passage), self._moved(changes))
        names = [name for name, value in passage.exits.items() if _is_real(value)]
        return [self._cutter.value(name, passage.exits[name]) for name in names], [exits[name] for name in names]

    def whiten(self, passages: Sequence[Passage], *, relative: bool = False) -> None:
        """From here on, take changes in units in which all directions count about alike, on these passages.

        `relative` ones are of the size of the tensors themselves, layer by layer.
        """
        inputs = self._whitened_inputs(passages)
        ones = [torch.ones_like(matrix[:, :1]) for matrix in self.start()]
        self._whitenings = tuple(Whitening(*pair) for pair in zip(inputs, ones, strict=True))
        problem = Linearised([self.residual(passages[0])], self.start())
        outputs = [whitened_outputs(gradients) for gradients in problem.pulled([_signs(r) for r in problem.residuals])]
        found = [Whitening(*pair) for pair in zip(inputs, outputs, strict=True)]
        if relative:
            sizes = [wide(part.matrix(self._base)) for part in self._parts]
            found = [whitening.relative_to(size) for whitening, size in zip(found, sizes, strict=True)]
        self._whitenings = tuple(found)

    def _whitened_inputs(self, passages: Sequence[Passage]) -> list[Tensor | None]:
        wanted = {part.node: part for part in self._parts if self._is_plain(part)}
        sums: dict[str, Accumulator] = {}
        generator = torch.Generator().manual_seed(0)

        def watch(node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
            if node.name not in wanted:
                return
            inputs, window = read_by(node.target, layer_call(node.target, args, kwargs))
            for rows, _ in paired_rows(inputs, result, window, POSITIONS, generator):
                sums.setdefault(node.name, Accumulator(rows.shape[1], rows.device)).update(rows)

        with torch.no_grad():
            for passage in passages:
                self._run(self._entries(passage), self._base, watch)
        found = {name: whitened_inputs(sums[name].moments(), part.bias is not None) for name, part in wanted.items()}
        like = wide(next(iter(self._base.values())))
        return [found[part.node].to(like) if part.node in found else None for part in self._parts]

    def _is_plain(self, part: Part) -> bool:
        """Whether every column but a bias' is an input that can be seen."""
        if part.weight is None or part.input_dim is None:
            return False
        return part.matrix(self._base).shape[1] <= MOST_INPUTS

    def _entries(self, passage: Passage) -> dict[str, Any]:
        return {name: self._cutter.value(name, value) for name, value in passage.entries.items()}

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
        return self._cutter.run(self._stretch, entries, {**self._stored, **tensors}, watch)


def _signs(like: Tensor) -> Tensor:
    """1 or -1 for every value, at random but always the same."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randint(2, like.shape, generator=generator, device=like.device).to(like) * 2 - 1


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
