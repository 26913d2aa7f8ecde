"""What of a segment may change: the weights and biases of its layers that nobody else uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.labels.constraints import Product
from recoup.recovery.segments import Segment
from recoup.statistics.calibrate import Calibration


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


def parts_of(calibration: Calibration, segment: Segment, tensors: Mapping[str, Tensor]) -> list[Part]:
    """The layers of a segment, with those of `tensors` that one call uses: changing them changes nothing else."""
    products, shared = calibration.structure.products, calibration.structure.shared
    names = [name for product in products for name in (product.weight, product.bias)]
    own = {name for name in tensors if names.count(name) == 1 and name not in shared}
    inside = {node.name for node in segment.nodes}
    layers = [product for product in products if product.node in inside]
    return [part for product in layers for part in _parts(product, own)]


def _parts(product: Product, own: set[str]) -> list[Part]:
    """One part for weight and bias, or two where their outputs are not in line, as in a grouped transposed layer."""
    weight = product.weight if product.weight in own else None
    bias = product.bias if product.bias in own else None
    if weight is None and bias is None:
        return []
    if weight is None or bias is None or product.output_dim == 0 or product.input_dim is not None:
        return [Part(product.node, weight, bias, product.input_dim)]
    return [Part(product.node, weight, None, None), Part(product.node, None, bias, None)]
