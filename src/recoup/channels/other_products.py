"""What a network multiplies outside of its layers: attention scores, recurrent cells, weights that are computed.

Torch counts each operation at full width (`FlopCounterMode`). A product of activations shrinks with the channels of the
dims that it multiplies over; of any other operation, with the channels of what it makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recoup.channels.structure import Structure
from recoup.graph.capture import Captured, input_nodes
from recoup.graph.code import site_of
from recoup.graph.regions import call_of
from recoup.labels.constraints import OtherProduct
from recoup.labels.layout import Layout
from recoup.operators.record import Letters, Operator, operator_of


def with_other_products(structure: Structure, layouts: Mapping[str, Any], captured: Captured) -> Structure:
    """The structure with all that the graph multiplies outside of layers; `layouts` has the channels of every value."""
    layers = {product.node for product in structure.products}
    moving = _read_inputs(captured)  # a weight that is computed is so once, for all samples
    nodes = [node for node in moving if node.op == "call_function" and node.name not in layers]
    found = (_products_of(node, layouts) for node in nodes if _may_multiply(operator_of(node.target)))
    with sdpa_kernel(SDPBackend.MATH):
        return replace(structure, others=tuple(other for others in found for other in others))


def _read_inputs(captured: Captured) -> list[fx.Node]:
    """Everything that depends on an input, in the order of the graph."""
    found: dict[fx.Node, None] = dict.fromkeys(input_nodes(captured))
    for node in captured.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found[node] = None
    return list(found)


def _may_multiply(record: Operator) -> bool:
    """Whether calls are worth counting; most of a graph acts on single elements, or moves them."""
    is_cheap = record.is_pointwise or record.is_movement or record.is_pooling or record.is_check or record.gives_number
    return not (is_cheap or record.flops)


def _products_of(node: fx.Node, layouts: Mapping[str, Any]) -> Iterator[OtherProduct]:
    """What one call multiplies; several products share its multiply-accumulates by their sizes."""
    macs = macs_of(node)
    if not macs:
        return
    pair = operator_of(node.target).pair
    paired = None if pair is None else pair(node)
    if paired is None:
        side = _channels(layouts.get(node.name))
        yield OtherProduct(node.name, site_of(node), macs, () if side is None else (side,))
        return
    sizes = [_sizes(operands) for operands in paired]
    whole = [torch.Size(size.values()).numel() for size in sizes]
    for operands, size, part in zip(paired, sizes, whole, strict=True):
        sides = tuple(_sides(operands, size, layouts))
        yield OtherProduct(node.name, site_of(node), macs * part // sum(whole), sides)


def macs_of(node: fx.Node) -> int:
    """Multiply-accumulates of one call, as torch counts them on tensors without values, or as its record says."""
    count = operator_of(node.target).macs
    if count is not None:
        return count(node)
    called, operands = call_of(node)
    read = map_aggregate((operands, node.kwargs), _without_values)
    assert isinstance(read, tuple)
    with suppress(Exception), FlopCounterMode(display=False) as counter:  # what cannot run so is no product of matrices
        called(*read[0], **read[1])
        return int(counter.get_total_flops()) // 2
    return 0


def _without_values(argument: Any) -> Any:
    """In the place of a node, tensors of its sizes that hold nothing."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    if isinstance(value, (list, tuple)):
        return type(value)(_without_values(part) for part in value)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _sizes(operands: list[tuple[fx.Node, Letters]]) -> dict[Any, int]:
    """The size that every letter stands for; a dim of length 1 is stretched."""
    sizes: dict[Any, int] = {}
    for operand, letters in operands:
        for letter, size in zip(letters, operand.meta["val"].shape, strict=True):
            if letter is not None:
                sizes[letter] = max(size, sizes.get(letter, 1))
    return sizes


def _sides(
    operands: list[tuple[fx.Node, Letters]], sizes: Mapping[Any, int], layouts: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The channels along every letter that has any; what meets along a letter is one channel."""
    known = set()
    for operand, letters in operands:
        layout = layouts.get(operand.name)
        if not isinstance(layout, Layout) or layout.dim is None or layout.channel_of is None:
            continue
        letter = letters[layout.dim]
        if letter is not None and letter not in known and len(layout.channel_of) == sizes[letter]:
            known.add(letter)
            yield layout.channel_of


def _channels(layout: Any) -> Tensor | None:
    """The channel of every index of the dim that a value's channels lie along."""
    return layout.channel_of if isinstance(layout, Layout) and layout.dim is not None else None
