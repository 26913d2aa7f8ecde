"""Residual blocks: the groups that live between a fork of the network and the addition that ends it."""

from __future__ import annotations

from torch import fx

from recoup.channels.patterns import LEFT_ALONE
from recoup.channels.structure import Structure
from recoup.graph.ancestry import ancestors, makers
from recoup.graph.capture import Captured
from recoup.operators.record import operator_of


def residual_blocks(structure: Structure, captured: Captured) -> tuple[tuple[str, ...], ...]:
    """Groups made inside each block, bottom-up; a group in no block is in none of them.

    A node lies inside the block of an addition when it leads to exactly one of the two operands. What the operands
    themselves consist of (the residual stream) is not inside, nor is a group that an inner block has already. Groups
    that the caller leaves alone are in their blocks all the same: what lies outside does not depend on the choice.
    """
    behind = ancestors(captured.graph)
    bit = {node.name: 1 << number for number, node in enumerate(captured.graph.nodes)}
    group_of = {producer: group.name for group in structure.groups for producer in group.producers}
    layers = {p.node: p.weight.removesuffix(".weight") for p in structure.products}
    made_by = {node: group_of[layer] for node, layer in layers.items() if layer in group_of}
    additions = _additions(captured.graph)
    ends = {operand for operands in additions for operand in operands}
    streams = {made_by[node.name] for end in ends for node in makers(end, lambda node: node.name in made_by)}
    taken: dict[str, int] = {}
    for number, (left, right) in enumerate(additions):
        inside = behind[left] ^ behind[right]
        for node, name in made_by.items():
            if name not in streams and bit[node] & inside:
                taken.setdefault(name, number)
    blocks: dict[int, list[str]] = {}
    for group in structure.groups:
        if group.name in taken and (group in structure.prunable or LEFT_ALONE in group.reasons):
            blocks.setdefault(taken[group.name], []).append(group.name)
    return tuple(tuple(names) for names in blocks.values())


def _additions(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Operand pairs of every addition of two computed tensors."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and operator_of(node.target).is_addition:
            operands = [value for value in node.args[:2] if isinstance(value, fx.Node)]
            if len(operands) == 2 and all(value.op == "call_function" for value in operands):
                found.append((operands[0], operands[1]))
    return found
