"""A run of a graph on sizes alone, before the real one: a stranger's graph may ask for any amount of memory.

torch's fake tensors have a shape and no memory. Python's integers have no such twin, so their operations are watched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from recoup.artefact.schema import LEAST, MOST
from recoup.graph.runner import last_uses, perform, run

# What the values of a checked graph may take at once, besides its weights; samples are chosen so that they do.
MOST_MEMORY = 1 << 30


def peak_memory(graph: fx.Graph, tensors: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> int:
    """The most bytes that the graph's values take at one time; `inputs` by the names of their nodes.

    Raises:
        Exception: whatever torch raises for operations that do not fit their operands.
    """
    nodes = list(graph.nodes)
    with torch.no_grad():
        plain = {name: tensor.detach() for name, tensor in tensors.items()}
    with FakeTensorMode() as mode, torch.no_grad():
        held = {name: mode.from_tensor(tensor) for name, tensor in plain.items()}
        given = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        values = run(nodes, given, held.__getitem__, perform=_watched)
    return _peak(nodes, values)


def _watched(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation; Python's own only on numbers of 64 bits, and they have to stay such."""
    if isinstance(node.target, torch._ops.OpOverload):
        return perform(node, args, kwargs)
    name = getattr(node.target, "__name__", "")
    if name != "getitem" and not all(isinstance(value, (int, float)) for value in (*args, *kwargs.values())):
        raise TypeError(f"{node.name} computes with something else than numbers")
    if name == "pow" and any(isinstance(value, int) and abs(value) > 64 for value in args[1:]):
        raise OverflowError(f"{node.name} raises to the power of {args[1]}")
    result = perform(node, args, kwargs)
    if isinstance(result, int) and not LEAST <= result <= MOST:
        raise OverflowError(f"{node.name} is an integer of more than 64 bits")
    return result


def _peak(nodes: list[fx.Node], values: Mapping[str, Any]) -> int:
    """Memory lives from the first value in it to the last reader of any value in it."""
    order = {node.name: place for place, node in enumerate(nodes)}
    reader = last_uses(nodes)
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in nodes:
        for leaf in tree_leaves(values.get(node.name)):
            if isinstance(leaf, Tensor):
                memory = leaf.untyped_storage()
                key, place = memory._cdata, order[node.name]
                sizes[key] = memory.nbytes()
                first.setdefault(key, place)
                last[key] = max(last.get(key, place), order[reader.get(node.name, node.name)])
    change = [0] * (len(nodes) + 1)
    for key, size in sizes.items():
        change[first[key]] += size
        change[last[key] + 1] -= size
    peak = now = 0
    for step in change:
        now += step
        peak = max(peak, now)
    return peak
