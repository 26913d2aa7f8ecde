"""The one way to run operations of a graph: node after node, on values kept by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import fx

from recoup.operators.record import operator_of

# From a node to the value it stands for.
Look: TypeAlias = Callable[[fx.Node], Any]
# Runs an operation on its arguments.
Perform: TypeAlias = Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any]], Any]
# Told of each operation that was run: its node, the arguments it was called with, and the result.
Watcher: TypeAlias = Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any], Any], None]


def arguments(node: fx.Node, look: Look) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation, with values in the place of nodes."""
    return tuple(fx.node.map_arg(node.args, look)), dict(fx.node.map_arg(node.kwargs, look))


def perform(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an operation returns for these arguments.

    Raises:
        RuntimeError: they do not fit together.
    """
    require = operator_of(node.target).require
    if require is not None:
        require(args)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # the target of a call_function is one


def call(node: fx.Node, look: Look, watch: Watcher | None = None, perform: Perform = perform) -> Any:
    """What an operation returns."""
    args, kwargs = arguments(node, look)
    result = perform(node, args, kwargs)
    if watch is not None:
        watch(node, args, kwargs, result)
    return result


def lookup(values: Mapping[str, Any], stored: Callable[[str], Any]) -> Look:
    """Values by the names of their nodes; tensors of the module come from `stored`, by their own names."""

    def look(node: fx.Node) -> Any:
        return stored(str(node.target)) if node.op == "get_attr" else values[node.name]

    return look


def run(
    nodes: Iterable[fx.Node],
    values: Mapping[str, Any],
    stored: Callable[[str], Any],
    watch: Watcher | None = None,
    perform: Perform = perform,
    release: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """All values by name after the operations among `nodes` have run; `values` are those known before.

    `watch` is told of every operation, `perform` may run it in another way. Values in `release` go after the node they
    are listed under.
    """
    known = dict(values)
    look = lookup(known, stored)
    for node in nodes:
        if node.op == "call_function":
            known[node.name] = call(node, look, watch, perform)
        for name in release.get(node.name, ()):
            known.pop(name, None)
    return known


def last_uses(nodes: Iterable[fx.Node]) -> dict[str, str]:
    """For every value the last of the nodes that reads it, by name."""
    return {value.name: node.name for node in nodes for value in node.all_input_nodes}


def grouped(uses: Mapping[str, str]) -> dict[str, list[str]]:
    """The values that go after each node, from the last node that uses each value."""
    found: dict[str, list[str]] = {}
    for value, reader in uses.items():
        found.setdefault(reader, []).append(value)
    return found
