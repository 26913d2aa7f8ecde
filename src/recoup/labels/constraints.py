"""Constraints: what propagating labels finds out about them, written down now and resolved once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recoup.labels.arrays import FIXED, NONE, along, components, constant, core, varies

RETURNED = "the model returns it"

# Free parameters and constant maps get one label per element up to this many; larger ones stay as they are.
MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A parameter, buffer or constant of the model, by dotted name, with its value."""

    name: str
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size."""
        return tuple(self.value.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """Labels start..start+count-1, made together by one layer's weight."""

    start: int
    count: int
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Lock:
    """Labels that must stay, and why."""

    labels: Tensor
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Coupling:
    """Labels `pairs` (2, n) that are one channel each, and the operation that makes them so."""

    pairs: Tensor
    site: str


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Labels of an activation that is computed with, and the operation that does so."""

    labels: Tensor
    site: str


@dataclass(frozen=True, slots=True)
class Product:
    """One call of a layer that multiplies by a weight: it costs positions · kernel · both first dims of the weight.

    `input_dim` is the weight's dim that is summed over, and can be refitted; None for a grouped convolution, whose
    groups of inputs and outputs go together. `output_dim` is the dim of its outputs. `positions` is 0 for a sum, which
    costs nothing. `node` is the call's name in the graph, `where` the module it happens in.
    """

    weight: str
    bias: str | None
    positions: int
    kernel: int
    input_dim: int | None
    output_dim: int
    where: str
    node: str


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """A grouped convolution: its weight, and the labels of the inputs (g, n) and outputs (g, m) of each of its parts.

    The rows of the weight are its outputs, those of a `transposed` one its inputs.

    Whole parts may go, inputs with outputs, or the same number of channels in every part. Which it is stays open until
    all uses are known; `reason` is for channels that stay because whole parts go, `site` names the convolution.
    """

    weight: str
    transposed: bool
    inputs: Tensor
    outputs: Tensor
    reason: str
    site: str


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """A batch norm or activation: it costs `flops[i]` operations for `channels[i]`, and `fixed` ones in any case."""

    node: str
    channels: Tensor
    flops: Tensor
    fixed: int


@dataclass(frozen=True, slots=True, eq=False)
class OtherProduct:
    """Multiply-accumulates in no layer, such as those of attention scores: `macs` with all channels.

    They shrink in proportion to what is left along each of `sides`, which name the channel of every index of a dim.
    `site` names the operation and the module it happens in.
    """

    node: str
    site: str
    macs: int
    sides: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A normalisation over channels, `channels` in their order; a centred one takes their mean off.

    `gain` and `bias` name its parameters, `sources` the tensors that what it reads is a sum of. `site` names the
    operation and the module it happens in.
    """

    node: str
    site: str
    gain: str
    bias: str | None
    channels: Tensor
    is_centred: bool
    sources: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """An operand that meets channels along some dims and is repeated along others (`stretched`).

    Which of them the channels lie along in the end is not known yet; both are of the result's shape.
    """

    operand: Tensor
    channels: Tensor
    stretched: frozenset[int]
    reason: str


@dataclass(slots=True)
class Constraints:
    """Blocks, couplings, locks, sites and products, in the order they were met.

    `sites` says which label each index along a dim of a tensor has; `elements` which one each element of a free
    parameter of several dims has, until it is known along which of them its channels lie. `meetings` and `boxes` wait
    for the same: a box is an activation that is computed with, so what remains of it must be rectangular. With
    `sizes_stay`, the numbers in the code cannot be put right, and what they put beside channels is of fixed size. With
    `frees_norms`, what is normalised over channels may lose some of them; `norms` has these normalisations. `by_hand`
    names the nodes that read channels as a layer does, and are none yet; with `notes_sums`, `sums` has those that sum
    channels up, with their labels. `pieces` (n, size) are the labels of what the code cuts in n pieces of a size, which
    it goes on doing where numbers stay. `at` names the operation that is being followed, and `line` where it stands in
    the user's code, for the reasons.
    """

    blocks: list[Block] = field(default_factory=list)
    couplings: list[Coupling] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    sites: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    elements: dict[str, Tensor] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    grouped: list[Grouped] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    boxes: list[Computed] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    count: int = 0
    sizes_stay: bool = False
    frees_norms: bool = False
    by_hand: list[str] = field(default_factory=list)
    notes_sums: bool = False
    sums: list[tuple[str, Tensor]] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    at: str = ""
    line: str = ""

    def fresh(self, count: int) -> Tensor:
        """New labels (count,) for what no layer makes: free parameters, zeros put beside channels."""
        self.count += count
        return torch.arange(self.count - count, self.count)

    def lock(self, labels: Tensor, reason: str) -> None:
        """Whatever `labels` name has to stay."""
        (small,) = core(labels)
        named = small[small >= 0].unique()
        if named.numel():
            self.locks.append(Lock(named, self.located(reason)))

    def located(self, reason: str) -> str:
        """The reason with the line of the user's code that it is about, if that is known."""
        return f"{reason} ({self.line})" if self.line else reason

    def couple(self, left: Tensor, right: Tensor, reason: str) -> Tensor:
        """Labels that meet element by element are one channel from now on; what meets FIXED is locked."""
        left, right = torch.broadcast_tensors(left, right)
        a, b = core(left, right)
        both = (a >= 0) & (b >= 0) & (a != b)
        if bool(both.any()):
            self.couplings.append(Coupling(self._unique_pairs(a[both], b[both]), self.located(self.at)))
        self.lock(a[b == FIXED], reason)
        self.lock(b[a == FIXED], reason)
        for side in sorted((left, right), key=lambda labels: core(labels)[0].numel()):
            if bool((core(side)[0] >= 0).all()):  # it stands for both; the simpler one keeps later steps small
                return side
        return torch.where(a >= 0, a, torch.where(b >= 0, b, torch.minimum(a, b))).expand(left.shape)

    def _unique_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        keys = (left * self.count + right).unique()
        return torch.stack([keys // self.count, keys % self.count])

    def tie(self, table: Tensor, reason: str) -> Tensor:
        """All labels in a row of `table` (n, m) are one channel from now on; returns one of each row (n,)."""
        if not table.shape[1]:
            return table.new_full((len(table),), NONE)
        named = (table >= 0).int().argmax(dim=1, keepdim=True)
        chosen = table.gather(1, named)
        merged = torch.where(chosen >= 0, chosen, table.amin(dim=1, keepdim=True))
        self.couple(merged.expand_as(table), table, reason)
        return merged.squeeze(1)

    def channels_along(self, labels: Tensor, dim: int, reason: str) -> Tensor:
        """One label for each index of `dim` (n,); several that share an index are tied together."""
        (small,) = core(labels)
        if small.shape[dim] == 1:
            small = small.expand([*small.shape[:dim], labels.shape[dim], *small.shape[dim + 1 :]])
        return self.tie(small.movedim(dim, 0).reshape(small.shape[dim], -1), reason)

    def mix(self, labels: Tensor, dims: Sequence[int], reason: str) -> Tensor | None:
        """Labels after an operation that combines everything along `dims`.

        What is combined is tied into one channel where another dim tells channels apart; otherwise all of it stays,
        and the answer is None.
        """
        mixed = [dim for dim in dims if varies(labels, dim)]
        if not mixed:
            return labels
        if not any(varies(labels, dim) for dim in range(labels.dim()) if dim not in mixed):
            self.lock(labels, reason)
            return None
        (small,) = core(labels)
        others = [dim for dim in range(labels.dim()) if dim not in mixed]
        table = small.permute(*others, *mixed)
        merged = self.tie(table.reshape(-1, table[(0,) * len(others)].numel()), reason)
        shape = [1 if dim in mixed else size for dim, size in enumerate(small.shape)]
        return merged.view(shape).expand(labels.shape)

    def merged(self, labels: Tensor) -> Tensor:
        """Labels >= 0 with one of them, as far as is known by now, for each channel."""
        return self.components()[labels]

    def components(self) -> Tensor:
        """For every label the first label of its channel, as far as is known by now (count,)."""
        pairs = [coupling.pairs for coupling in self.couplings]
        return components(self.count, torch.cat(pairs, dim=1) if pairs else torch.zeros(2, 0, dtype=torch.long))

    def site(self, tensor: TensorRef, dim: int, labels: Tensor) -> None:
        """Index i along `dim` of a parameter or buffer goes with labels[i]."""
        known = self.sites.get((tensor.name, dim))
        reason = f"{tensor.name} is used in several places"
        self.sites[tensor.name, dim] = labels if known is None else self.couple(known, labels, reason)
        if tensor.name in self.elements:
            self.couple(self.elements[tensor.name], along(labels, dim, tensor.shape), reason)

    def cut_evenly(self, pieces: Sequence[Tensor], dim: int) -> None:
        """Each of these pieces is as long as the others along `dim`, whatever remains of their channels."""
        if len({piece.shape for piece in pieces}) != 1 or not any(varies(piece, dim) for piece in pieces):
            return
        small = [core(piece.movedim(dim, 0))[0].flatten(1) for piece in pieces]
        if all(table.shape[1] == 1 for table in small):
            self.pieces.append(torch.stack([table[:, 0].expand(pieces[0].shape[dim]) for table in small]))

    def outputs(self, weight: TensorRef, dim: int) -> Tensor:
        """Labels of what a weight makes along `dim`: the same at every call."""
        known = self.sites.get((weight.name, dim))
        if known is None:
            count = weight.shape[dim]
            self.blocks.append(Block(self.count, count, weight.name))
            known = self.fresh(count)
            self.site(weight, dim, known)
        return known

    def outputs_in_parts(self, weight: str, inputs: Tensor, count: int, reason: str, *, transposed: bool) -> Tensor:
        """Labels of the `count` outputs of a grouped convolution that reads `inputs` (g, n); the same at every call."""
        for known in self.grouped:
            if (known.weight, known.transposed, known.inputs.shape) == (weight, transposed, inputs.shape):
                self.couple(known.inputs, inputs, f"{weight} is used in several places")
                return known.outputs.flatten()
        self.blocks.append(Block(self.count, count, weight))
        outputs = self.fresh(count)
        parts = outputs.view(len(inputs), -1)
        self.grouped.append(Grouped(weight, transposed, inputs, parts, reason, self.located(self.at)))
        return outputs

    def are_made(self, labels: Tensor) -> bool:
        """Whether a layer makes any of these labels; those of free parameters no layer makes."""
        (small,) = core(labels)
        named = small[small >= 0].unique()
        ends = torch.tensor([[block.start, block.start + block.count] for block in self.blocks]).view(-1, 2)
        place = torch.searchsorted(ends[:, 0].contiguous(), named, right=True) - 1
        return bool(((place >= 0) & (named < ends[place, 1])).any()) if len(ends) else False

    def labels_of(self, value: Tensor | TensorRef) -> Tensor:
        """Labels of an operand; free parameters bring labels of their own."""
        if not isinstance(value, TensorRef):
            return value
        wide = [dim for dim, size in enumerate(value.shape) if size > 1]
        if not wide:
            return constant(value.shape, NONE)
        if not value.value.is_floating_point() or value.value.numel() > MOST_ELEMENTS:
            return constant(value.shape, FIXED)
        if len(wide) == 1:
            return self._labels_of_vector(value, wide[0])
        if value.name not in self.elements:
            self._label_elements(value)
        return self.elements[value.name]

    def _labels_of_vector(self, value: TensorRef, dim: int) -> Tensor:
        known = self.sites.get((value.name, dim))
        if known is None:
            known = self.fresh(value.shape[dim])
            self.site(value, dim, known)
        return along(known, dim, value.shape)

    def _label_elements(self, value: TensorRef) -> None:
        labels = self.fresh(value.value.numel()).view(value.shape)
        self.elements[value.name] = labels
        for (name, dim), known in list(self.sites.items()):
            if name == value.name:
                self.couple(labels, along(known, dim, value.shape), f"{name} is used in several places")
