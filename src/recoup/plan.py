"""The plan: everything that was decided, ready to be carried out. Algebra and structure meet here.

`apply(model, plan)` in `recoup.surgery.apply` decides nothing: it writes `weights`, takes `slices`, and for a model
in standalone form runs `graph`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Keep the indices `kept` (long) along `dim` of a parameter or buffer, `factor` times what they were.

    They are the same everywhere (n,), or those of each of the equal runs of dim 0 (runs, n): the weight of a grouped
    convolution has a run of rows for each part.
    """

    tensor: str
    dim: int
    kept: Tensor
    factor: float = 1.0

    @property
    def count(self) -> int:
        """How many indices are left along `dim`."""
        return self.kept.shape[-1]

    def of(self, value: Tensor) -> Tensor:
        """What is left of a tensor, which may have been cut along other dims."""
        left = self.places(value)
        return left if self.factor == 1.0 else left * self.factor

    def places(self, value: Tensor) -> Tensor:
        """The same without the factor."""
        kept = self.kept.to(value.device)
        if kept.dim() == 1:
            return value.index_select(self.dim, kept)
        runs: Tensor = value.unflatten(0, (len(kept), -1))
        shape = [len(kept), *[1] * value.dim()]
        shape[self.dim + 1] = self.count
        size = [self.count if dim == self.dim + 1 else n for dim, n in enumerate(runs.shape)]
        return runs.gather(self.dim + 1, kept.view(shape).expand(size)).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Centred:
    """Along `dim` of a parameter, what it has at the indices `kept` (long) adds up to zero."""

    tensor: str
    dim: int
    kept: Tensor


def centre(value: Tensor, where: Centred) -> Tensor:
    """The tensor with the mean over these indices taken off them."""
    kept = where.kept.to(value.device)
    part = value.index_select(where.dim, kept)
    return value.index_copy(where.dim, kept, part - part.mean(dim=where.dim, keepdim=True))


@dataclass(frozen=True, slots=True)
class Recovery:
    """How well one layer was refitted.

    `residual`: squared error of its output, relative to the output's variance, to expect on samples that were not
    fitted to, None where there were too few to tell; `ridge`: the absolute amount added to the covariance; `condition`:
    a lower bound on the condition number of the system that was solved; `inputs`: how many inputs the output was
    regressed on, and `rows` from how many samples of them, of equal weight: those that do not count are not counted.
    """

    residual: float | None
    ridge: float
    condition: float
    inputs: int
    rows: int

    @property
    def is_underdetermined(self) -> bool:
        """Whether the fit had fewer samples than unknowns: it then says nothing about new images."""
        return self.rows < self.inputs


@dataclass(frozen=True, slots=True)
class Check:
    """A condition that every call of a standalone result fulfils: an expression of its inputs' sizes that is true.

    `holds` is a tree of plain values, as in `recoup.graph.expressions`.
    """

    holds: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GraphPlan:
    """The graph a standalone result runs, with the index tensors it needs besides the model's own.

    `names`, `inputs` and `outputs` say how it is called: the names and tree of the arguments, the tree of the results.
    `checks` is what a call has to fulfil. `host` is the standalone form of the whole model, whose tensors are sliced; a
    saved plan has none.
    """

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    names: tuple[str, ...]
    inputs: TreeSpec
    outputs: TreeSpec
    checks: tuple[Check, ...] = ()
    host: nn.Module | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to keep and what to write.

    keep: bool mask of every prunable group, by group name.
    slices: what remains of each parameter and buffer.
    weights: refitted parameters at their original size, zero where inputs are pruned; a bias may be new to its layer.
    shapes: original shape of every tensor that is sliced or rewritten; `apply` refuses a model where they differ.
    recovery: how well each refitted layer was recovered, by layer name.
    graph: what the smaller model runs, if it is in standalone form.
    untied: weights of layers that were tables of embeddings too, and become the layers' own.
    norms: RMSNorms that the model's code writes out; torch's own take their place.
    idle: modules that do not run in eval mode, such as heads for training; they are not cut, and refuse to run.
    keeps_hooks: whether the model's hooks are a part of it.
    centred: what has no mean over the channels that are kept; `weights` have it so up to their own rounding.
    settings: what modules of the smaller model, or their configs, remember besides tensors, by dotted name.
    """

    keep: Mapping[str, Tensor]
    slices: tuple[Slice, ...]
    weights: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    recovery: Mapping[str, Recovery] = field(default_factory=dict)
    graph: GraphPlan | None = None
    untied: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    keeps_hooks: bool = False
    centred: tuple[Centred, ...] = ()
    settings: Mapping[str, int | bool] = field(default_factory=dict)
