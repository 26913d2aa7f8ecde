"""How a captured graph follows the sizes of its inputs: which of its numbers do, and what a call has to fulfil.

The graph is captured a second time with symbolic sizes. Where the first has a number, the second has an expression;
where the code asked for a size, in an `if` or an `assert`, the answer it got becomes a condition that every call must
fulfil. Sizes that cannot be followed are conditions too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from recoup.errors import CaptureError
from recoup.graph.capture import Captured, export, input_nodes
from recoup.graph.expressions import Tree, evaluate, multiplied, shown, write
from recoup.graph.symbolic import ONE_BATCH_ONLY, Numbers, Path, Symbolic, like
from recoup.inputs.batches import Inputs
from recoup.inputs.samples import SampledCall
from recoup.plan import Check


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

    symbolic = Symbolic(captured, export(model, call, follow), _leaves_of_samples(captured, samples, call))
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
        _replace(node, path, like(_at(node, path), evaluate(tree, read)))


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


def _is_fixed(tree: Tree) -> bool:
    return tree[0] == "eq" and not isinstance(tree[2], tuple) and tree[1][0] != "rank"


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
