"""What a sum over channels reads: something that is zero where its layers are, or something else.

The masked original puts those rows of layers to zero that make channels that go. Where all operations up to the sum
keep zero at zero, what is gone adds nothing, and the sum of what is left is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx

from recoup.channels.norm_paths import is_number, passes_on, site_of
from recoup.graph.capture import Captured
from recoup.graph.runner import call
from recoup.labels.constraints import Constraints
from recoup.operators.names import operation_name
from recoup.operators.record import Operator, operator_of

# Zero for each channel that is zero, over whatever dims of its own.
_NORMS = ("linalg_vector_norm", "norm")
# Zero where their gains and biases are: the places of these.
_AFFINE = {"batch_norm": (1, 2), "_native_batch_norm_legit_no_training": (1, 2), "instance_norm": (1, 2)}


def hold_sums(constraints: Constraints, captured: Captured) -> None:
    """Find what makes each sum's channels zero, and lock them where nothing does."""
    if not constraints.sums:
        return
    nodes, root = {node.name: node for node in captured.graph.nodes}, constraints.components()
    search = _Search(captured.tensors, {total.node for total in constraints.sums})
    for place, total in enumerate(constraints.sums):
        sources, obstacle = search.sources(nodes[total.node].all_input_nodes[0])
        wanted = root[total.channels].unique()
        stays = [
            name for name in sorted(sources) if not bool(torch.isin(wanted, _made_by(name, constraints, root)).any())
        ]
        if obstacle is None and stays:
            obstacle = f"{stays[0]} is not cut with it"
        if obstacle is not None:
            constraints.lock(total.channels, f"{total.site} sums over channels: {obstacle}")
        constraints.sums[place] = replace(total, sources=sources)


def _made_by(tensor: str, constraints: Constraints, root: Tensor) -> Tensor:
    """The channels that indices of a tensor belong to, by their roots."""
    sides = [labels for (name, _), labels in constraints.sites.items() if name == tensor]
    parts = [part.inputs if part.transposed else part.outputs for part in constraints.grouped if part.weight == tensor]
    named = torch.cat([labels.flatten() for labels in (*sides, *parts)] or [torch.zeros(0, dtype=torch.long)])
    return root[named[named >= 0]]


class _Search:
    """From a value back to the tensors that make its channels zero."""

    def __init__(self, tensors: Mapping[str, str], sums: set[str]) -> None:
        self._tensors, self._sums = tensors, sums

    def sources(self, value: fx.Node) -> tuple[frozenset[str], str | None]:
        """The tensors that a value is zero with, and what stands in the way of that."""
        found: set[str] = set()
        waiting, seen = [value], {value}
        while waiting:
            node = waiting.pop()
            made, behind = self._step(node)
            if behind is None:
                return frozenset(), f"{site_of(node)} comes before it"
            found |= made
            waiting += [source for source in behind if source not in seen]
            seen.update(behind)
        return frozenset(found), None

    def _step(self, node: fx.Node) -> tuple[frozenset[str], list[fx.Node] | None]:
        """The tensors that make a value, or those it is zero with; None where it may be something else."""
        if node.op == "placeholder" and node.name in self._tensors:
            return frozenset([self._tensors[node.name]]), []
        if node.op != "call_function" or node.name in self._sums:
            return frozenset(), None
        record, name = operator_of(node.target), operation_name(node.target)
        if record.layer is not None or name in _AFFINE:
            return self._makers(node, record, name)
        if name == "mul":
            return self._either(node)
        if name in ("div", *_NORMS) or record.is_pooling:
            return frozenset(), [node.args[0]] if isinstance(node.args[0], fx.Node) else None
        floating = [source for source in node.all_input_nodes if _is_floating(source)]
        if record.is_addition or record.is_movement:
            given = [value for value in node.args[:2] if not isinstance(value, (fx.Node, list, tuple))]
            plain = record.is_movement or (not given and not any(map(is_number, floating)))
            return frozenset(), floating if plain else None
        is_alike = passes_on(node, record) or (record.is_pointwise and len(floating) == 1 and _keeps_zero(node))
        return frozenset(), floating if is_alike else None

    def _makers(self, node: fx.Node, record: Operator, name: str) -> tuple[frozenset[str], list[fx.Node] | None]:
        if name in _AFFINE:
            given = [node.args[place] if len(node.args) > place else None for place in _AFFINE[name]]
            stored = [self._tensors.get(part.name) for part in given if isinstance(part, fx.Node)]
            return (frozenset(filter(None, stored)), []) if len(stored) == 2 and all(stored) else (frozenset(), None)
        assert record.layer is not None
        given = [record.layer.argument(node, "weight"), record.layer.argument(node, "bias")]
        stored = [self._tensors.get(part.name) for part in given if isinstance(part, fx.Node)]
        return (frozenset(filter(None, stored)), []) if all(stored) else (frozenset(), None)

    def _either(self, node: fx.Node) -> tuple[frozenset[str], list[fx.Node] | None]:
        """A product is zero where one of its factors is."""
        for factor in node.args[:2]:
            if isinstance(factor, fx.Node) and not is_number(factor) and factor.name not in self._tensors:
                sources, obstacle = self.sources(factor)
                if obstacle is None:
                    return sources, []
        return frozenset(), None


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _keeps_zero(node: fx.Node) -> bool:
    """Whether an operation on each element of one tensor gives zero for zero."""
    try:
        result = call(node, lambda source: torch.zeros(1) if _is_floating(source) else source.meta["val"])
    except (RuntimeError, TypeError, KeyError):
        return False
    return isinstance(result, Tensor) and not bool(result.any())
