"""The schedule of a twin run: the network's operations in order, and the layers that are refitted on the way.

A layer whose output meets the rest of the network in an addition, with nothing but affine operations between, can make
up for errors of what it is added to, the skip. For that the skip must be known when the layer is reached, so the
schedule computes it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from recoup.channels.structure import Consumer, Structure
from recoup.graph.activation import Activation
from recoup.graph.copies import copied
from recoup.graph.purity import make_pure
from recoup.operators.record import operator_of


@dataclass(frozen=True, slots=True, eq=False)
class RefitPoint:
    """A layer to be refitted: the `node` that calls it and the `skip` its output is added to, if any.

    `between` leads from the output to that addition: one affine operation after the other.
    """

    consumer: Consumer
    node: str
    target: Any
    skip: str | None
    between: Activation

    def scale(self, tensors: Mapping[str, Tensor], outputs: Tensor) -> Tensor | None:
        """By how much the addition's operand grows with each output, in a shape that `outputs` broadcasts with."""
        function = self.between.bind(tensors)
        layer = operator_of(self.target).layer
        dim = 1 if layer is not None and layer.has_window else outputs.dim() - 1
        probe = outputs.new_zeros([size if d == dim else 1 for d, size in enumerate(outputs.shape)])
        if function is None:
            return probe + 1
        slope: Tensor = function(probe + 1) - function(probe)
        return slope if slope.shape == probe.shape else None


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Operations in the order they are run, and the refit points among them in that order.

    `is_pure` is false where an operation writes into values that others read: the twin networks then share nothing.
    """

    nodes: tuple[fx.Node, ...]
    points: tuple[RefitPoint, ...]
    is_pure: bool

    def place(self, name: str) -> int:
        """Where in the schedule the node of that name is."""
        return next(number for number, node in enumerate(self.nodes) if node.name == name)


def make_schedule(graph: fx.Graph, structure: Structure) -> Schedule:
    """The schedule for the graph of a standalone form; every layer that is called once is a refit point."""
    graph, _ = copied(graph)
    is_pure = make_pure(graph)
    calls = [product.weight for product in structure.products]
    by_name = {node.name: node for node in graph.nodes}
    points = [
        _refit_point(consumer, by_name[consumer.node])
        for consumer in structure.consumers
        if calls.count(consumer.weight) == 1 and consumer.node in by_name
    ]
    order, points = _ordered(graph, points, by_name) if is_pure else (list(graph.nodes), _known_in_time(graph, points))
    place = {node.name: number for number, node in enumerate(order)}
    return Schedule(tuple(order), tuple(sorted(points, key=lambda point: place[point.node])), is_pure)


def drifting(schedule: Schedule, written: Iterable[str]) -> frozenset[str]:
    """Names of the nodes whose values change when the tensors in `written` do."""
    changed = set(written)
    found: set[str] = set()
    for node in schedule.nodes:
        is_written = node.op == "get_attr" and node.target in changed
        if is_written or any(value.name in found for value in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def mask_upto(schedule: Schedule, structure: Structure, keep: Tensor) -> dict[str, bytes]:
    """The part of a mask that decides what a point's layer meets, by the point's node.

    It is what the mask says of all channels of the tensors that are read up to there.
    """
    points = {point.node for point in schedule.points}
    met, found = torch.zeros(structure.width, dtype=torch.bool), {}
    channels: dict[str, list[Tensor]] = {}
    for site in structure.sites:
        channels.setdefault(site.tensor, []).append(site.channel_of[site.channel_of >= 0])
    for node in schedule.nodes:
        for value in node.all_input_nodes:
            for numbers in channels.pop(str(value.target), ()) if value.op == "get_attr" else ():
                met[numbers] = True
        if node.name in points:
            found[node.name] = keep[met].numpy().tobytes()
    return found


def _refit_point(consumer: Consumer, node: fx.Node) -> RefitPoint:
    between: list[fx.Node] = []
    here = node
    while len(here.users) == 1:
        user = next(iter(here.users))
        others = [value for value in user.all_input_nodes if value is not here]
        if _is_addition(user, here):
            return RefitPoint(consumer, node.name, node.target, others[0].name, Activation(node.name, tuple(between)))
        if not _is_affine(user, here, others):
            break
        between.append(user)
        here = user
    return RefitPoint(consumer, node.name, node.target, None, Activation())


def _is_addition(user: fx.Node, here: fx.Node) -> bool:
    """Whether `user` adds `here` to another activation of the same shape, one to one."""
    if user.op != "call_function" or not operator_of(user.target).is_addition or len(user.args) != 2 or user.kwargs:
        return False
    other = user.args[1] if user.args[0] is here else user.args[0]
    if not isinstance(other, fx.Node) or other is here or other.op not in ("call_function", "placeholder"):
        return False
    shapes = [getattr(value.meta.get("val"), "shape", None) for value in (here, other)]
    return shapes[0] is not None and shapes[0] == shapes[1]


def _is_affine(user: fx.Node, here: fx.Node, others: list[fx.Node]) -> bool:
    """Whether `user` scales and shifts what `here` makes, given stored tensors."""
    if user.op != "call_function" or any(value.op != "get_attr" for value in others) or user.kwargs:
        return False
    places = [place for place, argument in enumerate(user.args) if argument is here]
    if len(places) != 1 or places[0] not in operator_of(user.target).affine_in:
        return False
    # A batch norm on three dims may have positions where others have channels.
    record = operator_of(user.target)
    return record.is_pointwise or not record.is_channelwise or here.meta["val"].dim() != 3


def _known_in_time(graph: fx.Graph, points: list[RefitPoint]) -> list[RefitPoint]:
    """Refit points without the skips that are only computed after them."""
    place = {node.name: number for number, node in enumerate(graph.nodes)}
    late = [point for point in points if point.skip is not None and place[point.skip] > place[point.node]]
    return [_without_skip(point) if point in late else point for point in points]


def _without_skip(point: RefitPoint) -> RefitPoint:
    return replace(point, skip=None, between=Activation())


def _ordered(
    graph: fx.Graph, points: list[RefitPoint], by_name: Mapping[str, fx.Node]
) -> tuple[list[fx.Node], list[RefitPoint]]:
    """The nodes with every skip before its layer. Of two layers that are added, the one with more inputs corrects."""
    before: dict[fx.Node, set[fx.Node]] = {node: set(node.all_input_nodes) for node in graph.nodes}
    kept = []
    for point in sorted(points, key=lambda point: -point.consumer.kernel * len(point.consumer.inputs)):
        node = by_name[point.node]
        skip = by_name[point.skip] if point.skip is not None else None
        if skip is not None and _leads_to(node, skip, before):
            point, skip = _without_skip(point), None
        if skip is not None:
            before[node].add(skip)
        kept.append(point)
    return _sorted(list(graph.nodes), before), kept


def _leads_to(node: fx.Node, target: fx.Node, before: Mapping[fx.Node, set[fx.Node]]) -> bool:
    """Whether `target` needs `node`."""
    waiting, seen = [target], {target}
    while waiting:
        here = waiting.pop()
        if here is node:
            return True
        fresh = before[here] - seen
        seen |= fresh
        waiting.extend(fresh)
    return False


def _sorted(nodes: list[fx.Node], before: Mapping[fx.Node, set[fx.Node]]) -> list[fx.Node]:
    """The nodes, each after what it needs, otherwise in their own order."""
    done: dict[fx.Node, None] = {}
    place = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        waiting = [node]
        while waiting:
            missing = sorted((value for value in before[waiting[-1]] if value not in done), key=place.__getitem__)
            if missing:
                waiting.extend(reversed(missing))
            else:
                done.setdefault(waiting.pop())
    return list(done)
