"""What the paper counts besides layers: 2 operations per element of a batch norm, 1 per element of an activation."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from recoup.channels.propagate import Propagated
from recoup.channels.structure import Structure, numbers
from recoup.graph.capture import Captured
from recoup.labels.arrays import varying_dims
from recoup.labels.constraints import Elementwise
from recoup.operators.record import operator_of


def with_elementwise(structure: Structure, propagated: Propagated, numbering: Tensor, captured: Captured) -> Structure:
    """The structure with every batch norm and activation of the graph, and the channels of what they make."""
    found = []
    for node in captured.graph.nodes:
        flops = operator_of(node.target).flops if node.op == "call_function" else 0
        if flops:
            found.append(_elementwise(node.name, flops, propagated.labels[node.name], node.meta.get("val"), numbering))
    return replace(structure, elementwise=tuple(found))


def _elementwise(node: str, flops: int, labels: Any, value: Any, numbering: Tensor) -> Elementwise:
    """What one call costs. Elements are counted where labels change; each stands for those that repeat it."""
    labels, value = (part[0] if isinstance(part, (list, tuple)) else part for part in (labels, value))
    if not isinstance(labels, Tensor):
        size = prod(value.shape) if isinstance(value, Tensor) else 0
        return Elementwise(node, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), flops * size)
    dims = varying_dims(labels)
    small = labels[tuple(slice(None) if dim in dims else slice(0, 1) for dim in range(labels.dim()))]
    each = flops * labels.numel() // max(1, small.numel())
    channels, counts = numbers(small, numbering).unique(return_counts=True)
    is_channel = channels >= 0
    return Elementwise(node, channels[is_channel], each * counts[is_channel], int(each * counts[~is_channel].sum()))
