"""The standalone form of a model: a module that runs its captured graph, for classes that cannot hold other sizes.

The graph is interpreted, operation by operation. No source is made of it, so that a graph read from a file can do
nothing but call the operations it names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from recoup.errors import CaptureError, InputError
from recoup.graph.copies import copied
from recoup.graph.expressions import Tree, evaluate, shown
from recoup.graph.runner import grouped, last_uses
from recoup.operators.names import writes
from recoup.plan import GraphPlan

# Fetches an argument from the values that are known by their places.
_Fetch: TypeAlias = Callable[[list[Any]], Any]


class Standalone(nn.Module):
    """A plain module that runs a graph of ATen operations in eval mode.

    Parameters and buffers have the names they had in the model it was captured from; what the capture computed from
    them alone is stored under `folded`, constants of the code under `constants`. It trains and exports like any other
    module, but batch norms stay in eval mode and dropout stays off. A call of a form that the graph does not serve is
    refused.
    """

    def __init__(self, plan: GraphPlan, tensors: Mapping[str, Tensor]) -> None:
        """A module that runs the plan's graph on `tensors`, by dotted name."""
        super().__init__()
        self.graph = copied(plan.graph)[0]
        self.input_names, self.checks = plan.names, plan.checks
        self._trees = plan.inputs, plan.outputs
        self._program = _program(self.graph)
        self._owners = [_hold(self, name, tensors[name]) for name in self._program.stored]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this call.

        Raises:
            InputError: the graph does not serve a call of this form.
        """
        return tree_unflatten(self._program.run(self._entered(args, kwargs)), self._trees[1])

    def _entered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values that a run begins with."""
        entered = entering(self, args, kwargs)
        held = (getattr(owner, name.rpartition(".")[2]) for owner, name in zip(self._owners, self._program.stored))  # noqa: B905  # one for each
        return [*held, *entered.values()]

    def run_each(
        self,
        changes: Sequence[Mapping[str, Tensor]],
        look: Callable[[int, Any], None],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Show `look` what a call returns with each of some sets of other tensors, and the number of the set.

        What no set changes runs once: up to the first operation that reads a tensor of a set, its run is the module's.
        The graph must be pure.

        Raises:
            InputError: the graph does not serve a call of this form.
        """
        place = {name: number for number, name in enumerate(self._program.stored)}
        placed = [{place[name]: tensor for name, tensor in change.items() if name in place} for change in changes]
        form = self._trees[1]
        self._program.run_each(
            self._entered(args, kwargs), placed, lambda number, found: look(number, tree_unflatten(found, form))
        )

    @property
    def is_pure(self) -> bool:
        """Whether no operation writes into a value."""
        return not any(writes(node) for node in self.graph.nodes if node.op == "call_function")

    def follow(self, graph: fx.Graph) -> None:
        """Run `graph` from now on, which reads the same tensors; copies run the module's own again."""
        self._program = _program(graph)

    def __getstate__(self) -> dict[str, Any]:
        """What can be copied and pickled: the graph as rows, from which the rest is made again."""
        state = dict(self.__dict__)
        del state["_program"]
        return {**state, "graph": _rows(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Made again from `__getstate__`."""
        super().__setstate__({**state, "graph": _graph(state["graph"])})  # type: ignore[no-untyped-call]  # torch's
        self._program = _program(self.graph)

    def extra_repr(self) -> str:
        """How it is called, and what it does."""
        operations = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"({', '.join(self.input_names)}), {operations} operations"


def standalone(plan: GraphPlan, tensors: Mapping[str, Tensor]) -> Standalone:
    """The module that runs the plan's graph on `tensors`, by dotted name, those of the plan included.

    Raises:
        CaptureError: a tensor of the graph is none of the model's.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    held = {**tensors, **{name: value.to(device) for name, value in plan.constants.items()}}
    used = {str(node.target) for node in plan.graph.nodes if node.op == "get_attr"}
    if used - held.keys():
        raise CaptureError(
            "a part of the forward pass runs in a region of its own (autocast within the model, or gradients that it "
            "switches on), which a standalone graph cannot hold. Prune with keep_class=True, or take the region out."
        )
    return Standalone(plan, held)


def entering(host: Standalone, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names they have in the graph.

    Raises:
        InputError: the graph does not serve a call of this form.
    """
    places = [node.name for node in host.graph.nodes if node.op == "placeholder"]
    values = dict(zip(places, _flat(host, args, kwargs), strict=True))
    for check in host.checks:
        if not evaluate(check.holds, lambda leaf: _leaf(values, leaf)):
            raise InputError(
                f"this standalone model serves calls with {shown(check.holds)} only, as the code of its original was "
                f"captured that way; here {_seen(values)}. Prune with keep_class=True, or with calibration inputs of "
                "this form."
            )
    return values


def _flat(host: Standalone, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call; an argument may be given by place or by name, whichever way the model was captured."""
    names, form = host.input_names, host._trees[0]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or set(given) != set(names) or len(args) + len(kwargs) != len(given):
        raise InputError(
            f"this standalone model takes exactly ({', '.join(names)}), as its original was captured; it was called "
            f"with {len(args)} positional arguments and ({', '.join(kwargs)})."
        )
    positional = len(names) - len(form.children()[1].context)
    call = tuple(given[name] for name in names[:positional]), {name: given[name] for name in names[positional:]}
    try:
        return form.flatten_up_to(call)
    except ValueError as error:
        raise InputError(f"this standalone model takes inputs nested as they were captured: {error}") from error


def _leaf(values: Mapping[str, Any], leaf: Tree) -> Any:
    value = values[leaf[1]]
    if leaf[0] == "input":
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"{leaf[1]} must be a tensor, as it was when this standalone model was captured.")
    if leaf[0] == "rank":
        return value.dim()
    return value.shape[leaf[2]] if leaf[2] < value.dim() else None


def _seen(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{n} has shape {tuple(v.shape)}" if isinstance(v, Tensor) else f"{n} is {v!r}" for n, v in values.items()
    )


def _hold(root: nn.Module, name: str, value: Tensor) -> nn.Module:
    """Put a tensor where its name leads, through modules that hold nothing else; the module that holds it."""
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(last, value)
    else:
        owner.register_buffer(last, value)
    return owner


@dataclass(frozen=True, slots=True)
class _NodeName:
    """Stands for a node among arguments that are pickled."""

    name: str


def _rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """A graph as plain rows; an operator of torch's by its name, as it cannot be pickled."""
    name_of: Any = lambda read: _NodeName(read.name)  # noqa: E731  # fx thinks that only its own values go into a call
    rows = []
    for node in graph.nodes:
        target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target
        rows.append((node.op, node.name, target, *fx.node.map_arg((node.args, dict(node.kwargs)), name_of)))
    return rows


def _graph(rows: list[tuple[Any, ...]]) -> fx.Graph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def found(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _NodeName) else value

    for op, name, target, args, kwargs in rows:
        if op == "call_function" and isinstance(target, str):
            target = functools.reduce(getattr, target.split("."), torch.ops)
        call: Any = fx.node.map_aggregate((tuple(args), dict(kwargs)), found)
        nodes[name] = graph.create_node(op, target, call[0], call[1], name=name)
    return graph


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation: where its arguments are fetched from, where its result goes, which values nobody needs after.

    `reads` are the places of all values among its arguments.
    """

    target: Callable[..., Any]
    args: tuple[_Fetch, ...]
    kwargs: tuple[tuple[str, _Fetch], ...]
    reads: frozenset[int]
    place: int
    done: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Program:
    """A graph as steps over a list of values: stored tensors first, then inputs, then results."""

    stored: tuple[str, ...]
    steps: tuple[_Step, ...]
    size: int
    outputs: _Fetch

    def __deepcopy__(self, memo: dict[int, Any]) -> _Program:
        return self

    def run(self, values: list[Any]) -> list[Any]:
        values.extend([None] * (self.size - len(values)))
        self._run(values, 0, len(self.steps))
        return list(self.outputs(values))

    def run_each(
        self, values: list[Any], changes: Sequence[Mapping[int, Tensor]], look: Callable[[int, list[Any]], None]
    ) -> None:
        values.extend([None] * (self.size - len(values)))
        starts = [self._first_reader(change) for change in changes]
        done = 0
        for number in sorted(range(len(changes)), key=starts.__getitem__):
            self._run(values, done, starts[number])
            done = starts[number]
            own = list(values)
            for place, tensor in changes[number].items():
                own[place] = tensor
            self._run(own, done, len(self.steps))
            look(number, list(self.outputs(own)))

    def _first_reader(self, places: Iterable[int]) -> int:
        wanted = frozenset(places)
        readers = (number for number, step in enumerate(self.steps) if wanted & step.reads)
        return next(readers, len(self.steps))

    def _run(self, values: list[Any], start: int, end: int) -> None:
        for step in self.steps[start:end]:
            args = [fetch(values) for fetch in step.args]
            kwargs = {name: fetch(values) for name, fetch in step.kwargs}
            values[step.place] = step.target(*args, **kwargs)
            for place in step.done:
                values[place] = None


def _program(graph: fx.Graph) -> _Program:
    stored = list(dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    place = {node: stored.index(str(node.target)) for node in graph.nodes if node.op == "get_attr"}
    place |= {node: len(stored) + number for number, node in enumerate((*inputs, *calls))}
    by_name = {node.name: node for node in graph.nodes}
    ends = grouped({value: reader for value, reader in last_uses(graph.nodes).items() if by_name[value] in calls})
    steps = [_step(node, place, tuple(place[by_name[value]] for value in ends.get(node.name, ()))) for node in calls]
    output = next(node for node in graph.nodes if node.op == "output")
    return _Program(tuple(stored), tuple(steps), len(stored) + len(inputs) + len(calls), _fetch(output.args[0], place))


def _step(node: fx.Node, place: Mapping[fx.Node, int], done: tuple[int, ...]) -> _Step:
    args = tuple(_fetch(value, place) for value in node.args)
    kwargs = tuple((name, _fetch(value, place)) for name, value in node.kwargs.items())
    reads = frozenset(place[value] for value in node.all_input_nodes)
    return _Step(node.target, args, kwargs, reads, place[node], done)  # type: ignore[arg-type]  # of a call_function


def _fetch(value: Any, place: Mapping[fx.Node, int]) -> _Fetch:
    """What fetches an argument. It knows places only: a copy of the module has values of its own there."""
    if isinstance(value, fx.Node):
        number = place[value]
        return lambda values: values[number]
    if isinstance(value, (list, tuple)) and any(isinstance(part, (fx.Node, list, tuple)) for part in value):
        parts = [_fetch(part, place) for part in value]
        return lambda values: [part(values) for part in parts]
    fixed = list(value) if isinstance(value, (list, tuple)) else value
    return lambda _: fixed
