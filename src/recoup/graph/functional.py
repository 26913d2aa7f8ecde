"""A graph in which operations give new values instead of writing into old ones.

An operation in place is seen by whoever reads the same memory afterwards: the value itself, a view of it, what it is a
view of. Here it becomes its plain twin. Where others read what was written, the result is put back into the whole that
it was a part of, and they read from there. Writes into the model's tensors and inputs stay: the caller sees those.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from recoup.graph.memory import shares_memory
from recoup.graph.purity import plain_twin
from recoup.graph.runner import arguments, perform
from recoup.operators.names import argument, operation_name, writes
from recoup.operators.record import operator_of

aten = torch.ops.aten

# Elements of a value up to which it is found out, one by one, who reads what was written; beyond, everybody does.
MOST_ELEMENTS = 1 << 24
# The same elements in the same order.
_RESHAPED = frozenset({"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "unsqueeze", "squeeze"})
_JOINERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), aten.cat.default),
    "unbind": aten.stack.default,
}
_SCATTERED = {"slice": aten.slice_scatter.default, "select": aten.select_scatter.default}


def make_functional(graph: fx.Graph) -> None:
    """Replace, in the graph itself, what writes into its own values; what cannot be replaced stays as it is."""
    views = {node for node in graph.nodes if node.op == "call_function" and _is_view(node)}
    left_alone: set[fx.Node] = set()
    for writer in [node for node in graph.nodes if node.op == "call_function" and writes(node)]:
        write = _Write(writer, views)
        if write.whole.op != "call_function" or write.whole in left_alone or not write.replace():
            left_alone.add(write.whole)


def _is_view(node: fx.Node) -> bool:
    """Whether a value lies in the memory of its first operand; what had to be a copy, as `reshape` may, does not."""
    if not node.args or not isinstance(node.args[0], fx.Node) or not shares_memory(node):
        return False
    if operation_name(node.target) == "getitem" and not _is_view(node.args[0]):
        return False  # one of several results, such as the values of `topk`, that are new
    left, right = (_storage(value.meta.get("val")) for value in (node, node.args[0]))
    return left is None or right is None or left == right


def _storage(value: Any) -> int | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first.untyped_storage()._cdata if isinstance(first, Tensor) else None


class _Write:
    """One operation in place, and the value whose memory it writes into; `views` lie in that of others."""

    def __init__(self, writer: fx.Node, views: set[fx.Node]) -> None:
        self.writer, self.graph, self.views = writer, writer.graph, views
        self.whole, self.last = self._whole(), writer
        self.again: dict[fx.Node, fx.Node] = {}

    def replace(self) -> bool:
        """Whether it could be replaced."""
        twin, written = plain_twin(self.writer.target), self.writer.args[0]
        if twin is None or not isinstance(written, fx.Node) or not _is_alike(self.writer, twin):
            return False
        readers, path = self._later_readers(), self._path(written)
        if readers and not all(self._can_put_back(*step) for step in path):
            return False
        self.writer.target = twin
        self.views.discard(self.writer)
        if readers:
            self._hand_on(readers, path)
        return True

    def _whole(self) -> fx.Node:
        """The value in whose memory the result lies."""
        value: Any = self.writer
        while value in self.views:
            value = value.args[0]
        assert isinstance(value, fx.Node)
        return value

    def _later_readers(self) -> list[tuple[fx.Node, fx.Node]]:
        """Each older value in the same memory, with who reads it later; none if nobody reads there what was written."""
        members = self._members()
        if all(len(node.users) == 1 for node in members):
            return []
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        now, written = order[self.writer], self._elements(self.writer.args[0])
        late = {node: [user for user in node.users if order[user] > now] for node in members if order[node] < now}
        if not any(users and _overlap(self._elements(node), written) for node, users in late.items()):
            return []
        return [(node, user) for node, users in late.items() for user in users]

    def _members(self) -> list[fx.Node]:
        """All values in the same memory but those that follow from the write."""
        found = [self.whole]
        for node in found:
            found += [user for user in node.users if user in self.views and user is not self.writer]
        return found

    def _elements(self, value: Any) -> Tensor | None:
        """The numbers of the elements of the whole that a view consists of; None for all, or too many to tell."""
        shape = torch.Size(_known(size) for size in self.whole.meta["val"].shape)
        if shape.numel() > MOST_ELEMENTS:
            return None
        found: dict[fx.Node, Any] = {self.whole: torch.arange(shape.numel()).view(shape)}

        def look(node: fx.Node) -> Any:
            return found[node] if node in found else _known(node.meta["val"])

        for base, view in self._path(value):
            args, kwargs = map_aggregate(arguments(view, look), _known)
            found[view] = found[base] if writes(view) else perform(view, args, kwargs)
        return found[value].unique() if isinstance(found[value], Tensor) else None

    def _path(self, value: Any) -> list[tuple[fx.Node, fx.Node]]:
        """The views that lead from the whole to a value, each with what it is a view of."""
        steps = []
        while value is not self.whole:
            steps.append((value.args[0], value))
            value = value.args[0]
        return steps[::-1]

    def _can_put_back(self, base: fx.Node, view: fx.Node) -> bool:
        name = operation_name(view.target)
        if name == "getitem":
            return operation_name(base.target) in _JOINERS
        known = name in _RESHAPED or name in _JOINERS or name in _SCATTERED or name in ("transpose", "permute")
        return known or _is_all(base, view)

    def _hand_on(self, readers: list[tuple[fx.Node, fx.Node]], path: list[tuple[fx.Node, fx.Node]]) -> None:
        """Let all read from the new whole: what was written too, for it may be written into again."""
        users = list(self.writer.users)
        new = self.writer
        for base, view in reversed(path):
            new = self._put_into(base, view, new)
        self.again = {self.whole: new}
        for user in users if path else ():
            user.replace_input_with(self.writer, self._seen_again(self.writer.args[0]))
        for source, user in readers:
            user.replace_input_with(source, self._seen_again(source))

    def _put_into(self, base: fx.Node, view: fx.Node, new: fx.Node) -> fx.Node:
        """`base` with `new` in the place of its view."""
        name, rest = operation_name(view.target), view.args[1:]
        if name in _JOINERS or _is_all(base, view):
            return new  # in the first case its item has put the parts together
        if name == "getitem":
            parts = [new if place == rest[0] else self._add(view.target, base, place) for place in range(_count(base))]
            dim = argument(base, 1 if operation_name(base.target) == "unbind" else 2, "dim", 0)
            return self._add(_JOINERS[operation_name(base.target)], parts, dim)
        if name in _SCATTERED:
            return self._add(_SCATTERED[name], base, new, *rest, **view.kwargs)
        if name == "transpose":
            return self._add(view.target, new, *rest)
        if name == "permute":
            return self._add(view.target, new, _inverse(rest[0]))
        return self._add(aten.view_as.default, new, base)

    def _seen_again(self, value: Any) -> fx.Node:
        """The same view, of the new whole."""
        if value not in self.again:
            base = self._seen_again(value.args[0])
            self.again[value] = self._add(value.target, base, *value.args[1:], **value.kwargs)
            self.views.add(self.again[value])
        return self.again[value]

    def _add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One more operation behind the last."""
        with self.graph.inserting_after(self.last):
            self.last = self.graph.call_function(target, args, kwargs)
        self.last.meta = {**self.writer.meta, "val": computed(target, self.last)}
        return self.last


def _is_alike(writer: fx.Node, twin: Callable[..., Any]) -> bool:
    """Whether the plain twin gives what is left in the memory that is written into."""
    if torch.Tag.inplace_view in getattr(writer.target, "tags", ()):
        return False
    try:
        result = computed(twin, writer)
    except Exception:  # a form of the call that the twin does not have
        return False
    return isinstance(result, Tensor) and result.dtype == writer.meta["val"].dtype


def computed(target: Callable[..., Any], node: fx.Node) -> Any:
    """What an operation gives for the arguments of a node, without values; nothing is asked of symbolic sizes."""
    args, kwargs = arguments(node, lambda source: source.meta["val"])
    modes = (getattr(source.meta.get("val"), "fake_mode", None) for source in node.all_input_nodes)
    environment = next((mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None), None)
    with environment.suppress_guards() if environment is not None else nullcontext():
        return target(*args, **kwargs)


def _known(value: Any) -> Any:
    """A symbolic size as the number that it is; asking for it in any other way would fix it."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _overlap(left: Tensor | None, right: Tensor | None) -> bool:
    return left is None or right is None or bool(torch.isin(left, right).any())


def _is_all(base: fx.Node, view: fx.Node) -> bool:
    """Whether a view is all of its base, as it is: an alias, or a slice from one end to the other."""
    values = [node.meta["val"] for node in (base, view)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    whole, part = ([_known(size) for size in value.shape] for value in values)
    is_slice = operation_name(view.target) in ("slice", "alias", "detach") or operator_of(view.target).returns_input
    return is_slice and whole == part


def _count(parts: fx.Node) -> int:
    return len(parts.meta["val"])


def _inverse(dims: Any) -> list[int]:
    return sorted(range(len(dims)), key=lambda place: dims[place] % len(dims))
