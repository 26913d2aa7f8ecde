"""The route of a walk through a network: its operations in order, and the layers to stop at.

A layer whose output meets the rest of the network in an addition, with nothing but affine operations between, can make
up for errors of what it is added to (the skip). For that the skip must be known when the layer is reached, so the route
computes it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from recoup.structure.following import Following, Step, step
from recoup.structure.groups import Consumer, Structure
from recoup.structure.operations import copied, operation_name, writes

# Operations that scale and shift every output on its own, given stored tensors.
_AFFINE = ("batch_norm", "mul", "div", "add", "sub", "dropout", "feature_dropout", "clone", "contiguous", "alias")
_ADDITIONS = ("add",)


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """A layer on the route: the `node` that calls it and the `skip` its output is added to, if any.

    `between` leads from the output to that addition: one affine operation after the other.
    """

    consumer: Consumer
    node: str
    target: Any
    skip: str | None
    between: Following

    def scale(self, tensors: Mapping[str, Tensor], outputs: Tensor) -> Tensor | None:
        """By how much the addition's operand grows with each output, in a shape that `outputs` broadcasts with."""
        function = self.between.bind(tensors)
        dim = 1 if operation_name(self.target).startswith("conv") else outputs.dim() - 1
        probe = outputs.new_zeros([size if d == dim else 1 for d, size in enumerate(outputs.shape)])
        if function is None:
            return probe + 1
        slope: Tensor = function(probe + 1) - function(probe)
        return slope if slope.shape == probe.shape else None


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A stretch of the route, from `start` to before `end`, that ends with a `stop` and what acts on its output alone.

    `nodes` are its operations, after those that count samples for them. `entries` are the values it reads from before,
    `exits` those of its own that are read after, `tensors` the weights and biases of its layers.
    """

    stop: Stop
    start: int
    end: int
    nodes: tuple[fx.Node, ...]
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Operations in the order they are run, and the stops among them in that order.

    `is_pure` is false where an operation writes into values that others read: the passes then share nothing.
    """

    nodes: tuple[fx.Node, ...]
    stops: tuple[Stop, ...]
    is_pure: bool

    def place(self, name: str) -> int:
        """Where on the route the node of that name is."""
        return next(number for number, node in enumerate(self.nodes) if node.name == name)

    def last_uses(self, stretches: Iterable[Stretch] = ()) -> dict[str, str]:
        """For every value the last node that needs it, by name; a stop needs its skip, a stretch what enters it."""
        skips = {stop.node: stop.skip for stop in self.stops if stop.skip is not None}
        ends: dict[str, list[Stretch]] = {}
        for stretch in stretches:
            ends.setdefault(self.nodes[stretch.end].name, []).append(stretch)
        last: dict[str, str] = {}
        for node in self.nodes:
            last |= dict.fromkeys((value.name for value in node.all_input_nodes), node.name)
            if node.name in skips:
                last[skips[node.name]] = node.name
            for stretch in ends.get(node.name, ()):
                last |= dict.fromkeys(stretch.entries, node.name)
        return last


def route(graph: fx.Graph, structure: Structure) -> Route:
    """The route through the graph of a standalone form; it stops at every layer that is called once."""
    graph, _ = copied(graph)
    is_pure = make_pure(graph)
    calls = [product.weight for product in structure.products]
    by_name = {node.name: node for node in graph.nodes}
    stops = [
        _stop(consumer, by_name[consumer.node])
        for consumer in structure.consumers
        if calls.count(consumer.weight) == 1 and consumer.node in by_name
    ]
    order, stops = _ordered(graph, stops, by_name) if is_pure else (list(graph.nodes), _known_in_time(graph, stops))
    place = {node.name: number for number, node in enumerate(order)}
    return Route(tuple(order), tuple(sorted(stops, key=lambda stop: place[stop.node])), is_pure)


def make_pure(graph: fx.Graph) -> bool:
    """Turn in-place operations on values nobody else reads into plain ones; whether none are left."""
    for node in [node for node in graph.nodes if node.op == "call_function" and writes(node)]:
        twin = _plain_twin(node.target)
        first = node.args[0] if node.args else None
        if twin is None or not isinstance(first, fx.Node) or not _is_own(first, node):
            return False
        node.target = twin
    return True


def drifting(route: Route, written: Iterable[str]) -> frozenset[str]:
    """Names of the nodes whose values change when the tensors in `written` do."""
    changed = set(written)
    found: set[str] = set()
    for node in route.nodes:
        is_written = node.op == "get_attr" and node.target in changed
        if is_written or any(value.name in found for value in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def stretch_before(route: Route, structure: Structure, stop: Stop, start: int | None = None) -> Stretch:
    """The stretch from `start`, or the layer that last made some of the stop's inputs, to the next layer behind it."""
    calls = {product.node for product in structure.products}
    here = route.place(stop.node)
    if start is None:
        start = max((route.place(node) for node in _makers(route, structure, stop)), default=here)
    end = next(n for n in range(here + 1, len(route.nodes)) if _ends(route.nodes[n], calls))
    return _stretch(route, structure, stop, start, end)


def whole_stretch(route: Route, structure: Structure) -> Stretch:
    """All of the network, from its inputs to its outputs, which are in the order they are returned in."""
    found = _stretch(route, structure, route.stops[-1], 0, len(route.nodes) - 1)
    returned = [value.name for value in route.nodes[-1].all_input_nodes]
    return replace(found, exits=tuple(sorted(found.exits, key=returned.index)))


def _stretch(route: Route, structure: Structure, stop: Stop, start: int, end: int) -> Stretch:
    inside = [node for node in route.nodes[start:end] if node.op == "call_function"]
    inside = [*_counters(route, inside), *inside]
    names = {node.name for node in inside}
    read = {value for node in inside for value in node.all_input_nodes if value.op in ("call_function", "placeholder")}
    entries = tuple(sorted(value.name for value in read if value.name not in names))
    exits = tuple(
        node.name for node in inside if not _counts(node) and any(user.name not in names for user in node.users)
    )
    layers = [product for product in structure.products if product.node in names]
    tensors = [name for product in layers for name in (product.weight, product.bias) if name is not None]
    return Stretch(stop, start, end, tuple(inside), entries, exits, tuple(dict.fromkeys(tensors)))


def _counters(route: Route, inside: list[fx.Node]) -> list[fx.Node]:
    """Operations from before that tell the ones inside how many samples there are."""
    needed = set(inside)
    for node in reversed(route.nodes):
        if _counts(node) and any(user in needed for user in node.users):
            needed.add(node)
    return [node for node in route.nodes if node in needed and node not in inside]


def _counts(node: fx.Node) -> bool:
    """Whether a node gives a number, not a tensor: a size, or arithmetic on sizes."""
    module = getattr(node.target, "__module__", "")
    name = operation_name(node.target)
    return node.op == "call_function" and (name == "sym_size" or (module == "_operator" and name != "getitem"))


def _ends(node: fx.Node, calls: set[str]) -> bool:
    return node.op == "output" or node.name in calls


def _makers(route: Route, structure: Structure, stop: Stop) -> list[str]:
    """Calls, before the stop, of the layers that make channels it reads."""
    read = {group.name for group in structure.groups if stop.consumer.name in group.consumers}
    makers = {name for group in structure.groups if group.name in read for name in group.producers}
    here = {node.name for node in route.nodes[: route.place(stop.node)]}
    return [p.node for p in structure.products if p.weight.removesuffix(".weight") in makers and p.node in here]


def _stop(consumer: Consumer, node: fx.Node) -> Stop:
    steps: list[Step] = []
    here = node
    while len(here.users) == 1:
        user = next(iter(here.users))
        others = [value for value in user.all_input_nodes if value is not here]
        if _is_addition(user, here):
            return Stop(consumer, node.name, node.target, others[0].name, Following(tuple(steps)))
        if not _is_affine(user, here, others):
            break
        steps.append(step(user, here, {value.name: str(value.target) for value in others}))
        here = user
    return Stop(consumer, node.name, node.target, None, Following())


def _is_addition(user: fx.Node, here: fx.Node) -> bool:
    """Whether `user` adds `here` to another activation of the same shape, one to one."""
    if operation_name(user.target) not in _ADDITIONS or len(user.args) != 2 or user.kwargs:
        return False
    other = user.args[1] if user.args[0] is here else user.args[0]
    if not isinstance(other, fx.Node) or other is here or other.op not in ("call_function", "placeholder"):
        return False
    shapes = [getattr(value.meta.get("val"), "shape", None) for value in (here, other)]
    return shapes[0] is not None and shapes[0] == shapes[1]


def _is_affine(user: fx.Node, here: fx.Node, others: list[fx.Node]) -> bool:
    name = operation_name(user.target)
    if name not in _AFFINE or any(value.op != "get_attr" for value in others) or user.kwargs:
        return False
    if sum(argument is here for argument in user.args) != 1:
        return False
    if name == "batch_norm":
        return user.args[0] is here and here.meta["val"].dim() != 3
    return name != "div" or user.args[0] is here


def _is_own(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a value is fresh and nobody but `reader` reads it, so that nobody sees it overwritten."""
    schema = getattr(value.target, "_schema", None)
    is_fresh = schema is not None and all(result.alias_info is None for result in schema.returns)
    is_fresh = is_fresh and "dropout" not in operation_name(value.target)  # in eval mode it returns its input
    return value.op == "call_function" and is_fresh and set(value.users) == {reader}


def _plain_twin(target: Any) -> Callable[..., Any] | None:
    """aten.relu.default for aten.relu_.default."""
    packet = getattr(torch.ops.aten, operation_name(target), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _known_in_time(graph: fx.Graph, stops: list[Stop]) -> list[Stop]:
    """Stops without the skips that are only computed after them."""
    place = {node.name: number for number, node in enumerate(graph.nodes)}
    late = [stop for stop in stops if stop.skip is not None and place[stop.skip] > place[stop.node]]
    return [replace(stop, skip=None, between=Following()) if stop in late else stop for stop in stops]


def _ordered(graph: fx.Graph, stops: list[Stop], by_name: Mapping[str, fx.Node]) -> tuple[list[fx.Node], list[Stop]]:
    """The nodes with every skip before its stop. Of two layers that are added, the one with more inputs corrects."""
    before: dict[fx.Node, set[fx.Node]] = {node: set(node.all_input_nodes) for node in graph.nodes}
    kept = []
    for stop in sorted(stops, key=lambda stop: -stop.consumer.kernel * len(stop.consumer.inputs)):
        node = by_name[stop.node]
        skip = by_name[stop.skip] if stop.skip is not None else None
        if skip is not None and _leads_to(node, skip, before):
            stop, skip = replace(stop, skip=None, between=Following()), None
        if skip is not None:
            before[node].add(skip)
        kept.append(stop)
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
