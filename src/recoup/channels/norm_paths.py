"""What a normalisation over channels reads: a sum of layers' outputs, tables and free parameters, or something else.

A channel that these leave at zero is zero where it is normalised, and adds nothing to the statistics. Where the
outputs of each are centred over the channels that are left, so is the sum, and the mean is zero over any number.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from recoup.graph.capture import Captured, module_path
from recoup.labels.constraints import Constraints
from recoup.operators.names import operation_name
from recoup.operators.record import Operator, operator_of

# They keep what is zero at zero, and a mean over channels of zero too.
_CASTS = ("to", "_to_copy")
_LINEAR = ("clone", "contiguous", "alias", *_CASTS, "detach", "type_as", "mean", "sum")
_SCALES = ("mul", "div")


def hold_norms(constraints: Constraints, captured: Captured) -> None:
    """Find what every normalisation reads a sum of, and lock where it is no such sum."""
    nodes = {node.name: node for node in captured.graph.nodes}
    stored = {captured.tensors[name]: nodes[name] for name in captured.tensors if name in nodes}
    for place, norm in enumerate(constraints.norms):
        sources, obstacle = _sources(nodes[norm.node].all_input_nodes[0], captured, norm.is_centred)
        users = {user for name in (norm.gain, norm.bias) if name is not None for user in stored[name].users}
        if obstacle is None and any(user.name not in {other.node for other in constraints.norms} for user in users):
            obstacle = f"{norm.gain} is read by others too"
        if obstacle is not None:
            constraints.lock(norm.channels, f"{norm.site} normalises over channels: {obstacle}")
        constraints.norms[place] = replace(norm, sources=sources)


def _sources(value: fx.Node, captured: Captured, is_centred: bool) -> tuple[frozenset[str], str | None]:
    """The tensors that a value is a sum of, and what stands in the way of that."""
    found: set[str] = set()
    waiting, seen = [value], {value}
    while waiting:
        node = waiting.pop()
        behind: list[fx.Node] = []
        if node.op == "placeholder":
            found.update(captured.tensors[node.name] for _ in range(node.name in captured.tensors))
        elif node.op != "call_function":
            return frozenset(), f"{node.name} is nothing to be changed"
        elif makes_channels(node, operator_of(node.target)):
            found |= {captured.tensors[part.name] for part in node.all_input_nodes if part.name in captured.tensors}
        elif is_centred and _rounds(node):
            return frozenset(), f"{_site(node)} fixes its precision, in which it is not centred exactly"
        elif passes_on(node, operator_of(node.target)):
            behind = [source for source in node.all_input_nodes if not _is_number(source)]
        else:
            return frozenset(), f"{_site(node)} comes before it"
        waiting += [source for source in behind if source not in seen]
        seen.update(behind)
    return frozenset(found), None


def makes_channels(node: fx.Node, record: Operator) -> bool:
    """Whether it is a layer, all of whose outputs see all inputs, or a table."""
    if record.layer is None:
        return operation_name(node.target) == "embedding"
    return not (record.layer.has_window and record.layer.argument(node, "groups", 1) != 1)


def _rounds(node: fx.Node) -> bool:
    """Whether it casts to a precision that is written into the code."""
    given = (*node.args, *node.kwargs.values())
    return operation_name(node.target) in _CASTS and any(
        isinstance(value, torch.dtype) and value.is_floating_point for value in given
    )


def _site(node: fx.Node) -> str:
    return f"{operation_name(node.target)} in {module_path(node) or 'forward'}"


def passes_on(node: fx.Node, record: Operator) -> bool:
    """Whether what is zero stays zero, and each channel is treated alike."""
    name = operation_name(node.target)
    if record.is_addition:
        return all(isinstance(value, fx.Node) for value in node.args[:2])
    return record.is_movement or record.returns_input or name in _LINEAR or (name in _SCALES and _is_scaled(node))


def _is_scaled(node: fx.Node) -> bool:
    """Whether a product or a quotient has a number for its other operand, stored as a tensor or not."""
    left, right = node.args[:2]
    if operation_name(node.target) == "div":
        return _is_any_number(right)
    return _is_any_number(left) or _is_any_number(right)


def _is_any_number(value: object) -> bool:
    return _is_number(value) if isinstance(value, fx.Node) else True


def _is_number(node: fx.Node) -> bool:
    """Whether a value is a single number that no channel decides: stored, given, or made of such."""
    value = node.meta.get("val")
    is_single = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_single and (node.op != "call_function" or all(_is_number(source) for source in node.all_input_nodes))
