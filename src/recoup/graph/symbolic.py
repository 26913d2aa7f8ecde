"""A captured graph beside the same one captured with symbolic sizes, and what is learnt from the two.

Where the first has a number, the second has an expression. What the code was told when it asked for a size becomes a
condition.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from recoup.errors import CaptureError
from recoup.graph.capture import Captured, input_nodes
from recoup.graph.expressions import NoExpressionError, Tree, evaluate, tree_of
from recoup.operators.record import operator_of
from recoup.plan import Check

# The place of a number among a node's arguments: args or kwargs, then indices into lists.
Path: TypeAlias = tuple[Any, ...]

# Numbers as they are for one sample and as trees, by node and place.
Numbers: TypeAlias = Mapping[str, Mapping[Path, tuple[Any, Tree]]]

# Files in which torch itself asks for sizes, to know how a result lies in memory: no path through the code hangs on it.
_OWN_QUESTIONS = (
    "/torch/_prims",
    "/torch/_refs/",
    "/torch/_decomp/",
    "/torch/_meta_registrations",
    "/torch/_subclasses/",
    "/torch/_ops.py",
    "/torch/fx/experimental/",
)
# Other sizes to see whether an equality holds for them as well: multiples, by the dim.
_STRETCHED = ((2,), (3, 2), (2, 1, 3))
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


ONE_BATCH_ONLY = "so a standalone graph of it would serve one batch size only. Prune with keep_class=True."


@dataclass(slots=True, eq=False)
class Symbolic:
    """The captured graph beside the program with symbolic sizes."""

    captured: Captured
    program: Any
    batch: frozenset[Tree]
    leaves: dict[Any, Tree] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    inputs: list[tuple[fx.Node, fx.Node]] = field(init=False)
    values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        specs = self.program.graph_signature.input_specs
        names = {spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT}
        twins = [node for node in self.program.graph.nodes if node.op == "placeholder" and node.name in names]
        self.inputs = list(zip(input_nodes(self.captured), twins, strict=True))
        self.values = {node.name: node.meta.get("plain", node.meta["val"]) for node, _ in self.inputs}

    def traced(self, leaf: Tree) -> Any:
        """What a leaf was for the captured graph."""
        value = self.values[leaf[1]]
        if leaf[0] == "input":
            return value
        return value.dim() if leaf[0] == "rank" else value.shape[leaf[2]]

    def sizes(self) -> dict[Tree, Any]:
        """All leaves as they were for the captured graph."""
        found: dict[Tree, Any] = {}
        for name, value in self.values.items():
            if isinstance(value, Tensor):
                found |= {("size", name, dim): size for dim, size in enumerate(value.shape)}
                found["rank", name] = value.dim()
            else:
                found["input", name] = value
        return found

    def find_leaves(self) -> None:
        """Name the symbols by the inputs that they are sizes of."""
        for node, twin in self.inputs:
            value = twin.meta["val"]
            if isinstance(value, Tensor):
                for dim, size in enumerate(value.shape):
                    self._name(size, ("size", node.name, dim))
            else:
                self._name(value, ("input", node.name))

    def _name(self, value: Any, leaf: Tree) -> None:
        expression = value.node.expr if isinstance(value, torch.SymInt) else None
        if expression is not None and expression.is_Symbol:
            self.leaves.setdefault(expression, leaf)

    def check_inputs(self) -> None:
        """Sizes that stay as they were, that are equal to others, or that have bounds."""
        for node, twin in self.inputs:
            value = twin.meta["val"]
            if not isinstance(value, Tensor):
                self._check_value(node, value)
                continue
            self.checks.append(Check(("eq", ("rank", node.name), value.dim())))
            for dim, size in enumerate(value.shape):
                self._check_size(("size", node.name, dim), size)

    def _check_value(self, node: fx.Node, value: Any) -> None:
        leaf, own = ("input", node.name), self.values[node.name]
        if isinstance(value, torch.SymInt) and self.leaves.get(value.node.expr) == leaf:
            return
        if own is None or isinstance(own, (bool, int, float, str)):
            self.checks.append(Check(("eq", leaf, own)))

    def _check_size(self, leaf: Tree, size: Any) -> None:
        tree = self._tree(size)
        if tree != leaf:
            self.checks.append(Check(("eq", leaf, tree)))
            if isinstance(tree, int) and tree != self.traced(leaf):
                raise CaptureError(f"the model's code fixes the number of samples, {ONE_BATCH_ONLY}")
            return
        bounds = self.program.range_constraints.get(size.node.expr)
        lower, upper = (int(bounds.lower), bounds.upper) if bounds is not None else (0, math.inf)
        if lower > 2 or (lower == 2 and leaf not in self.batch):  # torch takes 0 and 1 for cases of their own
            self.checks.append(Check(("ge", leaf, lower)))
        if upper < sys.maxsize - 1:
            self.checks.append(Check(("le", leaf, int(upper))))

    def check_answers(self) -> None:
        """What the code was told when it asked for a size."""
        environment = next(
            (t.fake_mode.shape_env for _, n in self.inputs if hasattr(t := n.meta["val"], "fake_mode")), None
        )
        if environment is None:
            return
        for guard in environment.guards:
            is_own = _is_own_question(guard)
            try:
                tree = tree_of(guard.expr.xreplace(environment.replacements), self.leaves)
            except NoExpressionError:
                if not is_own:
                    self._fix(guard.expr.free_symbols)
                continue
            if isinstance(tree, tuple) and Check(tree) not in self.checks and not (is_own and self._is_no_matter(tree)):
                self.checks.append(Check(tree))

    def _is_no_matter(self, tree: Tree) -> bool:
        """Whether the answer to a question of torch's own leaves other sizes open.

        Torch takes an equality for a fact from there on, and writes numbers for expressions; one that holds for other
        sizes too, such as one about memory, is none.
        """
        return tree[0] != "eq" or all(_holds(tree, functools.partial(self._stretched, by)) for by in _STRETCHED)

    def _stretched(self, by: tuple[int, ...], leaf: Tree) -> Any:
        """A leaf as it might be in another call: sizes are multiples of what they were."""
        value = self.traced(leaf)
        return value * by[leaf[-1] % len(by)] if leaf[0] == "size" else value

    def _fix(self, symbols: Any) -> None:
        for symbol in symbols:
            leaf = self.leaves.get(symbol)
            if leaf is not None:
                self.checks.append(Check(("eq", leaf, self.traced(leaf))))

    def numbers(self) -> Iterator[tuple[str, dict[Path, tuple[Any, Tree]]]]:
        """The numbers of each node that follow the inputs, as they are for one sample and as trees."""
        left, right = _operations(self.captured.graph), _operations(self.program.graph)
        if len(left) < len(right):  # a slice to the whole size of its input is no slice where that size is known
            right = [node for node in right if not _ends_with_its_input(node)]
        if [node.target for node in left] != [node.target for node in right]:
            raise CaptureError(f"the model runs other operations for another number of samples, {ONE_BATCH_ONLY}")
        for node, twin in zip(left, right, strict=True):
            found = {}
            for path, own, other in _pairs((node.args, dict(node.kwargs)), (twin.args, dict(twin.kwargs))):
                if other is None and own in (0, sys.maxsize):  # the bounds of a slice that goes to the end
                    continue
                tree = self._tree_at(node, own, other)
                if isinstance(tree, tuple):
                    found[path] = (like(own, evaluate(tree, self._of_one)), tree)
            if found:
                yield node.name, found

    def _of_one(self, leaf: Tree) -> Any:
        return 1 if leaf in self.batch else self.traced(leaf)

    def _tree_at(self, node: fx.Node, own: Any, other: Any) -> Tree:
        """The tree of a number; None for what is none."""
        if isinstance(own, fx.Node) or not isinstance(own, (int, float)) or isinstance(own, bool):
            return None
        value = other.meta["val"] if isinstance(other, fx.Node) else other
        tree = self._tree(value) if isinstance(value, _SYMBOLIC) else value
        try:
            same = math.isclose(evaluate(tree, self.traced), own, rel_tol=1e-12)
        except (TypeError, ZeroDivisionError):
            same = False
        if not same:
            raise CaptureError(f"{node.name} depends on the number of samples in a way of its own, {ONE_BATCH_ONLY}")
        return tree

    def _tree(self, value: Any) -> Tree:
        if not isinstance(value, _SYMBOLIC):
            return value
        try:
            return tree_of(value.node.expr, self.leaves)
        except NoExpressionError as error:
            raise CaptureError(f"a size depends on the inputs in its own way ({error}), {ONE_BATCH_ONLY}") from error


def like(before: Any, value: Any) -> Any:
    """The value as a number of the same kind."""
    return type(before)(value) if type(before) in (int, float) else value


def _holds(tree: Tree, read: Callable[[Tree], Any]) -> bool:
    try:
        return bool(evaluate(tree, read))
    except ZeroDivisionError:
        return False


def _is_own_question(guard: Any) -> bool:
    asked = getattr(guard.sloc, "framework_loc", None)
    if asked is None or not any(part in asked.filename for part in _OWN_QUESTIONS):
        return False
    # An operation that takes plain numbers only, as pooling does, makes one of a size.
    is_fixed = type(guard.expr).__name__ == "Equality" and asked.filename.endswith("/torch/_ops.py")
    return not is_fixed


def _operations(graph: fx.Graph) -> list[fx.Node]:
    """The operations on tensors: no arithmetic on sizes, no checks, no slices that take everything."""
    found = []
    for node in graph.nodes:
        is_operation = node.op == "call_function" and not isinstance(node.meta.get("val"), (*_SYMBOLIC, int, float))
        if node.op == "output" or (is_operation and not operator_of(node.target).is_check and not _takes_all(node)):
            found.append(node)
    return found


def _takes_all(node: fx.Node) -> bool:
    """Whether a slice leaves nothing out: such a one is written as an alias, or not at all, where sizes are known."""
    if node.target is torch.ops.aten.alias.default:
        return True
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    start, end, step = (*node.args[2:], *(None, None, None)[: 5 - len(node.args)])[:3]
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= sys.maxsize)) and step in (None, 1)


def _ends_with_its_input(node: fx.Node) -> bool:
    """Whether a slice ends where its input does, whatever the sizes are."""
    if node.target is not torch.ops.aten.slice.Tensor or len(node.args) != 4 or node.args[2] not in (None, 0):
        return False
    value, dim, _, end = node.args
    end = end.meta["val"] if isinstance(end, fx.Node) else end
    size = value.meta["val"].shape[dim]  # type: ignore[union-attr]  # a slice is of a tensor, along a dim
    both = [part.node.expr if isinstance(part, torch.SymInt) else part for part in (end, size)]
    return bool(both[0] == both[1])


def _pairs(own: Any, other: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """What is in the same places of two calls."""
    if isinstance(own, (list, tuple)):
        if not isinstance(other, (list, tuple)) or len(own) != len(other):
            raise CaptureError(f"an operation is called differently for another number of samples, {ONE_BATCH_ONLY}")
        for place, (a, b) in enumerate(zip(own, other, strict=True)):
            yield from _pairs(a, b, (*path, place))
    elif isinstance(own, Mapping):
        for name in own:
            yield from _pairs(own[name], other.get(name) if isinstance(other, Mapping) else None, (*path, name))
    else:
        yield path, own, other
