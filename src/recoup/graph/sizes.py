"""How a captured graph follows the sizes of its inputs: which of its numbers do, and what a call has to fulfil.

The graph is captured a second time with symbolic sizes. Where the first has a number, the second has an expression;
where the code asked for a size, in an `if` or an `assert`, the answer it got becomes a condition that every call must
fulfil. Sizes that cannot be followed are conditions too.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from recoup.errors import CaptureError
from recoup.graph.capture import Captured, export, input_nodes
from recoup.graph.expressions import NoExpressionError, Tree, evaluate, multiplied, shown, tree_of, write
from recoup.inputs.batches import Inputs
from recoup.inputs.samples import SampledCall
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


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that follow the inputs, by node and place, and the conditions for all else.

    `traced` has the sizes of the captured call, and numbers among its inputs; `batch` are those that count samples.
    """

    numbers: Numbers
    checks: tuple[Check, ...]
    traced: Mapping[Tree, Any]
    batch: frozenset[Tree]

    @property
    def fixed(self) -> tuple[Check, ...]:
        """The conditions that leave no choice: a size or a number that is what it was."""
        return tuple(check for check in self.checks if _is_fixed(check.holds))


def sizes_of(model: nn.Module, samples: SampledCall, captured: Captured, many: int, *, any_size: bool) -> Sizes:
    """How the captured graph follows its inputs: the number of samples, or all of their sizes.

    The symbolic capture has `many` samples: another number than the first, and none for which torch goes other ways.

    Raises:
        CaptureError: the graph serves one batch size only, or cannot be followed through all sizes.
        TooManyConditionsError: following all sizes takes too much.
    """
    call = samples.times(many)
    has_numbers = any(type(leaf) is int for leaf in tree_leaves((call.args, dict(call.kwargs))))
    try:
        return _sizes(model, samples, captured, call, any_size=any_size, with_numbers=has_numbers)
    except CaptureError:
        if not has_numbers:
            raise
    # Code such as torch.tensor([t]) writes a number into the graph: it stays as it was, and every call is asked for it.
    return _sizes(model, samples, captured, call, any_size=any_size, with_numbers=False)


def _sizes(
    model: nn.Module, samples: SampledCall, captured: Captured, call: Inputs, *, any_size: bool, with_numbers: bool
) -> Sizes:
    batched = samples.batched_in(call)

    def follow(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            has_batch = any(argument is tensor for tensor in batched)
            return tuple(Dim.AUTO if any_size or (has_batch and dim == 0) else None for dim in range(argument.dim()))
        return Dim.AUTO if with_numbers and type(argument) is int else None

    symbolic = _Symbolic(captured, export(model, call, follow), _leaves_of_samples(captured, samples, call))
    symbolic.find_leaves()
    symbolic.check_inputs()
    symbolic.check_answers()
    sizes = Sizes(dict(symbolic.numbers()), tuple(symbolic.checks), symbolic.sizes(), symbolic.batch)
    for check in sizes.checks:
        if not evaluate(check.holds, symbolic.traced):
            raise CaptureError(f"the model's code takes another way where {shown(check.holds)}, {ONE_BATCH_ONLY}")
    return sizes


def _leaves_of_samples(captured: Captured, samples: SampledCall, call: Inputs) -> frozenset[Tree]:
    """The sizes that count samples."""
    batched = samples.batched_in(call)
    given = captured.signature.inputs.flatten_up_to((tuple(call.args), dict(call.kwargs)))
    pairs = zip(input_nodes(captured), given, strict=True)
    return frozenset(("size", node.name, 0) for node, value in pairs if any(value is tensor for tensor in batched))


def follow_sizes(graph: fx.Graph, numbers: Numbers) -> None:
    """Make every number that follows the inputs do so, in place; nodes know their `origin` in the captured graph."""
    inputs: dict[str, fx.Node] = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    leaves: dict[Tree, fx.Node] = {}
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))

    def read(leaf: Tree) -> fx.Node:
        if leaf[0] == "input":
            return inputs[leaf[1]]
        if leaf not in leaves:
            with graph.inserting_before(first):
                leaves[leaf] = graph.call_function(torch.ops.aten.sym_size.int, (inputs[leaf[1]], leaf[2]))
        return leaves[leaf]

    for node, path, tree in _followed(graph, numbers):
        with graph.inserting_before(node):
            _replace(node, path, write(tree, graph, read))


def put_for_one(graph: fx.Graph, numbers: Numbers) -> None:
    """Make every number of the captured graph what it is for one sample, in place."""
    for node in graph.nodes:
        for path, (one, _) in numbers.get(node.name, {}).items():
            _replace(node, path, one)


def put_for_many(graph: fx.Graph, sizes: Sizes, count: int) -> None:
    """Make every number of a graph for one sample, cut or not, what it is for `count` of them, in place."""

    def read(leaf: Tree) -> Any:
        return count if leaf in sizes.batch else sizes.traced[leaf]

    for node, path, tree in _followed(graph, sizes.numbers):
        _replace(node, path, _like(_at(node, path), evaluate(tree, read)))


def _followed(graph: fx.Graph, numbers: Numbers) -> Iterator[tuple[fx.Node, Path, Tree]]:
    """Every number of a graph that follows the inputs, with its tree: where channels changed it, the tree has too."""
    for node in list(graph.nodes):
        for path, (before, tree) in numbers.get(node.meta.get("origin", node.name), {}).items():
            value = _at(node, path)
            followed = tree if value == before else multiplied(tree, before, value)
            if followed is None:
                raise CaptureError(
                    f"the number {value} in {node.name} depends on the inputs' sizes and on channels in a way that is "
                    "not understood. Prune with keep_class=True."
                )
            yield node, path, followed


def _like(before: Any, value: Any) -> Any:
    return type(before)(value) if type(before) in (int, float) else value


@dataclass(slots=True, eq=False)
class _Symbolic:
    """The captured graph beside the program with symbolic sizes, and what is learnt from it."""

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
                    found[path] = (_like(own, evaluate(tree, self._of_one)), tree)
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


def _holds(tree: Tree, read: Callable[[Tree], Any]) -> bool:
    try:
        return bool(evaluate(tree, read))
    except ZeroDivisionError:
        return False


def _is_fixed(tree: Tree) -> bool:
    return tree[0] == "eq" and not isinstance(tree[2], tuple) and tree[1][0] != "rank"


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


def _at(node: fx.Node, path: Path) -> Any:
    value: Any = (node.args, node.kwargs)
    for step in path:
        value = value[step]
    return value


def _replace(node: fx.Node, path: Path, new: Any) -> None:
    def changed(value: Any, rest: Path) -> Any:
        if not rest:
            return new
        if isinstance(value, Mapping):
            return {name: changed(part, rest[1:]) if name == rest[0] else part for name, part in value.items()}
        return [changed(part, rest[1:]) if place == rest[0] else part for place, part in enumerate(value)]

    args, kwargs = changed((tuple(node.args), dict(node.kwargs)), path)
    node.args, node.kwargs = tuple(args), dict(kwargs)
