"""What a network costs at given widths: multiply-accumulates, other operations, and parameters."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor, nn

from recoup.channels.structure import Structure
from recoup.labels.constraints import Product


@dataclass(frozen=True, slots=True)
class Cost:
    """Multiply-accumulates of one sample in all that multiplies matrices, and number of parameters.

    Convolutions, linear layers, attention, recurrent cells: what torch's FlopCounterMode counts. `elementwise` counts
    2 operations per element of a batch norm and 1 per element of an activation. With them it is `flops`, as the paper
    counts (Xie et al., arXiv 2108.13728): a multiply-accumulate is one operation.
    """

    macs: int
    parameters: int
    elementwise: int = 0

    @property
    def flops(self) -> int:
        """Operations of one sample: multiply-accumulates, batch norms and activations."""
        return self.macs + self.elementwise

    def to_json(self) -> dict[str, int]:
        """Plain data, ready for `json.dumps`."""
        return {**dataclasses.asdict(self), "flops": self.flops}


def cost(structure: Structure, model: nn.Module, keep: Tensor | None = None) -> Cost:
    """The cost of `model` when only the channels in `keep` remain; of the whole model without it."""
    mask = structure.keep_all() if keep is None else keep
    macs = sum(macs_by_product(structure, mask).values()) + _in_no_layer(structure, mask)
    return Cost(macs, _parameters(structure, model, mask), _elementwise(structure, mask))


def macs_by_product(structure: Structure, keep: Tensor) -> dict[Product, int]:
    """Multiply-accumulates of every call of a layer; a recurrent one has several weights, each with its own."""
    widths = {
        (site.tensor, site.dim): int(structure.keep_indices(site.channel_of, keep).sum()) // site.runs
        for site in structure.sites
    }

    def width(tensor: str, dim: int) -> int:
        return widths.get((tensor, dim), structure.shapes[tensor][dim])

    return {p: p.positions * p.kernel * width(p.weight, 0) * width(p.weight, 1) for p in structure.products}


def _in_no_layer(structure: Structure, keep: Tensor) -> int:
    """Multiply-accumulates that no layer makes, of what is left."""
    total = 0
    for other in structure.others:
        kept = [int(structure.keep_indices(side, keep).sum()) for side in other.sides]
        total += other.macs * math.prod(kept) // math.prod(len(side) for side in other.sides)
    return total


def _elementwise(structure: Structure, keep: Tensor) -> int:
    """Operations of batch norms and activations on what is left."""
    return sum(term.fixed + int(term.flops[keep[term.channels]].sum()) for term in structure.elementwise)


def _parameters(structure: Structure, model: nn.Module, keep: Tensor) -> int:
    sizes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    for piece in structure.slices(keep):
        if piece.tensor in sizes:
            sizes[piece.tensor][piece.dim] = piece.count
    return sum(math.prod(size) for size in sizes.values())
