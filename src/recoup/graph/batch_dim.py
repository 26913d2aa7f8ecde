"""Which numbers in a captured graph stand for the batch: those that differ between captures at two batch sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from recoup.errors import CaptureError

# The place of a number among a node's arguments: args or kwargs, then indices into lists.
Path: TypeAlias = tuple[Any, ...]
# A number a + b · batch, by node name and place.
Scaling: TypeAlias = Mapping[str, Mapping[Path, tuple[int, int]]]

ONE_BATCH_ONLY = "so a standalone graph of it would serve one batch size only. Prune with keep_class=True."


def scaling_of(one: fx.Graph, two: fx.Graph, many: fx.Graph, samples: int) -> dict[str, dict[Path, tuple[int, int]]]:
    """How numbers grow with the batch, from captures of one sample and of two; one of many `samples` must agree.

    Raises:
        CaptureError: the model does something else for another number of samples, or a number grows in another way.
    """
    left, right, third = ([node for node in graph.nodes if node.op != "placeholder"] for graph in (one, two, many))
    if not [node.target for node in left] == [node.target for node in right] == [node.target for node in third]:
        raise CaptureError(f"the model runs other operations for another number of samples, {ONE_BATCH_ONLY}")
    found: dict[str, dict[Path, tuple[int, int]]] = {}
    for a, b, c in zip(left, right, third, strict=True):
        triples = zip(*(_numbers((node.args, dict(node.kwargs))) for node in (a, b, c)), strict=True)
        for (path, x), (_, y), (_, z) in triples:
            if x == y == z:
                continue
            if a.op == "output" or isinstance(x, float) or z != x + (samples - 1) * (y - x):
                raise CaptureError(f"{a.name} depends on the number of samples in a way of its own, {ONE_BATCH_ONLY}")
            found.setdefault(a.name, {})[path] = (2 * x - y, y - x)
    return found


def follow_batch(graph: fx.Graph, scaling: Scaling, source: fx.Node) -> None:
    """Make every number that stands for the batch follow dim 0 of `source`, in place."""
    after = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(after):
        batch = graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
    for node in list(graph.nodes):
        for path, (fixed, slope) in scaling.get(node.meta.get("origin", node.name), {}).items():
            with graph.inserting_before(node):
                _replace(node, path, _expression(graph, batch, _at(node, path), fixed, slope))
    if not batch.users:
        graph.erase_node(batch)


def _expression(graph: fx.Graph, batch: fx.Node, value: int, fixed: int, slope: int) -> fx.Node:
    """a + b · batch; where channels have changed the number, it was b · batch and still is."""
    if value != fixed + slope:
        if fixed:
            raise CaptureError(
                f"the number {value} depends on the batch and on channels in a way that is not understood. Prune with "
                "keep_class=True."
            )
        slope = value
    scaled = batch if slope == 1 else graph.call_function(operator.mul, (batch, slope))
    return graph.call_function(operator.add, (scaled, fixed)) if fixed else scaled


def _numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from _numbers(part, (*path, place))
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from _numbers(value[name], (*path, name))


def _at(node: fx.Node, path: Path) -> int:
    value: Any = (node.args, node.kwargs)
    for step in path:
        value = value[step]
    return int(value)


def _replace(node: fx.Node, path: Path, new: fx.Node) -> None:
    def changed(value: Any, rest: Path) -> Any:
        if not rest:
            return new
        if isinstance(value, Mapping):
            return {name: changed(part, rest[1:]) if name == rest[0] else part for name, part in value.items()}
        return [changed(part, rest[1:]) if place == rest[0] else part for place, part in enumerate(value)]

    args, kwargs = changed((node.args, node.kwargs), path)
    node.args, node.kwargs = tuple(args), dict(kwargs)
