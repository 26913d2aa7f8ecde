"""The graph of a standalone result as plain data, and back. Nothing is generated from it or evaluated.

Every node is checked before it is made: its name, the names of its keywords and of the tensors it reads, that it reads
only nodes before it, and that its operation is one of `operators.py`. An argument is a number, a text, null, a list, or
an object with one key that says what it stands for: {"node": "relu"}, {"dtype": "float32"}, {"float": "inf"}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from recoup.artefact.files import FORMAT
from recoup.artefact.operators import name_of, operation
from recoup.artefact.schema import (
    TEXT,
    Check,
    MisfitError,
    distinct,
    dotted,
    identifier,
    integer,
    listing,
    mapping,
    one_of,
    record,
    text,
)
from recoup.artefact.tree import classes_in, tree_from_json, tree_to_json
from recoup.errors import ArtefactError, warn
from recoup.graph.expressions import FUNCTIONS as TREE_FUNCTIONS
from recoup.graph.expressions import LEAVES
from recoup.graph.memory import memory_of
from recoup.operators.names import writes
from recoup.plan import Check as Condition
from recoup.plan import GraphPlan

_NODES, _ARGUMENTS = 200_000, 100_000
_DEPTH, _DIMS, _POWER = 60, 16, 16


def _table(*names: str) -> dict[str, Any]:
    """torch's own values of these names, as far as this version has them."""
    return {name: getattr(torch, name) for name in names if hasattr(torch, name)}


# Arguments that are names in the torch namespace: closed tables, as a name from a file is not looked up anywhere else.
_TYPES = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz complex64 complex128
    int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
"""
DTYPES = _table(*_TYPES.split())
_NAMED: dict[str, tuple[type, dict[str, Any]]] = {
    "dtype": (torch.dtype, DTYPES),
    "layout": (torch.layout, _table("strided")),
    "memory_format": (
        torch.memory_format,
        _table("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    ),
}
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def graph_to_json(plan: GraphPlan) -> dict[str, Any]:
    """Plain data that `graph_from_json` takes.

    Raises:
        ArtefactError: an operation or an argument has no plain form, or none that would be loaded again.
    """
    data = {
        "format": FORMAT,
        "names": list(plan.names),
        "inputs": tree_to_json(plan.inputs),
        "outputs": tree_to_json(plan.outputs),
        "checks": [_tree_to_json(check.holds) for check in plan.checks],
        "nodes": [_node_to_json(node) for node in plan.graph.nodes],
    }
    try:
        nodes = GRAPH_SCHEMA(data, "")["nodes"]
        _checks(data["checks"], {node.name for node in plan.graph.nodes if node.op == "placeholder"})
        _graph(nodes, {str(entry["target"]).partition(".")[0] for entry in nodes})
    except MisfitError as error:
        raise ArtefactError(
            f"the graph cannot be saved, as it could not be loaded again: {error}. Prune with keep_class=True, or "
            "report the model."
        ) from error
    return data


def graph_from_json(data: Any, libraries: Collection[str] = (), classes: Iterable[type] = ()) -> GraphPlan:
    """The plan of a standalone module, whose constants are among its saved tensors; `data` fits `GRAPH_SCHEMA`.

    Raises:
        MisfitError: it is no graph that capture could have written.
        ArtefactError: it calls what it may not.
    """
    graph = _graph(data["nodes"], libraries)
    inputs = tree_from_json(data["inputs"], "inputs", classes)
    outputs = tree_from_json(data["outputs"], "outputs", classes)
    places = sum(node.op == "placeholder" for node in graph.nodes)
    if inputs.num_leaves != places:
        raise MisfitError("inputs", f"a tree with {places} leaves, one for each placeholder", inputs.num_leaves)
    results = next(iter(reversed(graph.nodes))).args[0]
    if not isinstance(results, (list, tuple)) or outputs.num_leaves != len(results):
        raise MisfitError("outputs", "a tree with a leaf for each result of the output node", outputs.num_leaves)
    _check_signature(data["inputs"], data["names"])
    _tell_of_classes((classes_in(data["inputs"]) | classes_in(data["outputs"])), classes)
    checks = _checks(data["checks"], {node.name for node in graph.nodes if node.op == "placeholder"})
    return GraphPlan(graph, {}, tuple(data["names"]), inputs, outputs, checks)


def _checks(trees: list[Any], inputs: Collection[str]) -> tuple[Condition, ...]:
    """What a call has to fulfil: trees of known functions over sizes of the graph's own inputs."""
    return tuple(Condition(_tree(tree, inputs, f"checks[{place}]", 0)) for place, tree in enumerate(trees))


def _tree(value: Any, inputs: Collection[str], where: str, depth: int) -> Any:
    if type(value) is not list:
        return _plain(value, where)
    name = value[0] if value else None
    if depth > _DEPTH or type(name) is not str:
        raise MisfitError(where, f"the name of a function first, at most {_DEPTH} levels deep", value)
    if name in LEAVES:
        if len(value) != (3 if name == "size" else 2) or type(value[1]) is not str or value[1] not in inputs:
            raise MisfitError(where, "about one of the graph's inputs", value)
        return (name, value[1], *(integer(0, _DIMS - 1)(dim, where) for dim in value[2:]))
    if name not in TREE_FUNCTIONS or len(value) not in (2, 3):
        raise MisfitError(where, f"one of {', '.join(TREE_FUNCTIONS)} and its arguments", name)
    parts = [_tree(part, inputs, f"{where}[{at}]", depth + 1) for at, part in enumerate(value[1:], start=1)]
    if name == "pow" and not (type(parts[1]) in (int, float) and abs(parts[1]) <= _POWER):
        raise MisfitError(where, f"a power of at most {_POWER}", value)
    return (name, *parts)


def _tree_to_json(tree: Any) -> Any:
    return [_tree_to_json(part) for part in tree] if isinstance(tree, tuple) else tree


def require_unwritten(graph: fx.Graph, parameters: Collection[str]) -> None:
    """Refuse a graph that writes into a parameter: buffers may keep a state, what was trained never changes by a call.

    Raises:
        MisfitError: an in-place operation reaches a parameter, itself or through views of it.
    """
    for node in graph.nodes:
        if node.op == "call_function" and writes(node):
            source = memory_of(node.args[0]) if node.args else None
            if source is not None and source.op == "get_attr" and str(source.target) in parameters:
                raise MisfitError(f"the node {node.name}", "one that leaves parameters alone", str(source.target))


def _graph(entries: list[dict[str, Any]], libraries: Collection[str]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for place, entry in enumerate(entries):
        where, name, op = f"nodes[{place}]", entry["name"], entry["op"]
        if name in nodes:
            raise MisfitError(f"{where}.name", "new", name)
        if (op == "output") != (place == len(entries) - 1):
            raise MisfitError(f"{where}.op", "output for the last node and no other", op)
        if op in ("placeholder", "get_attr") and (entry["args"] or entry["kwargs"]):
            raise MisfitError(where, f"a {op} without arguments", entry["args"] or entry["kwargs"])
        if op == "output" and (entry["kwargs"] or len(entry["args"]) != 1):
            raise MisfitError(where, "an output with one argument", entry["args"])
        args = [_decoded(part, nodes, f"{where}.args[{at}]") for at, part in enumerate(entry["args"])]
        kwargs = {key: _decoded(part, nodes, f"{where}.kwargs.{key}") for key, part in entry["kwargs"].items()}
        target = _TARGETS[op](entry["target"], f"{where}.target")
        target = operation(target, libraries) if op == "call_function" else target
        nodes[name] = graph.create_node(op, target, tuple(args), kwargs, name=name)
        if nodes[name].name != name:  # a name of Python's own
            raise MisfitError(f"{where}.name", f"another name, such as {nodes[name].name}", name)
    return graph


def _check_signature(inputs: Any, names: list[str]) -> None:
    """A call has positional arguments and keywords; each has a name."""
    pair = inputs.get("tuple") if isinstance(inputs, dict) and "class" not in inputs else None
    args, kwargs = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
    if not isinstance(args, dict) or "tuple" not in args or not isinstance(kwargs, dict) or "dict" not in kwargs:
        raise MisfitError("inputs", "a tuple of arguments and a dict of keywords", inputs)
    if len(names) != len(args["tuple"]) + len(kwargs["dict"]):
        raise MisfitError("names", f"{len(args['tuple']) + len(kwargs['dict'])} names, one for each argument", names)
    for place, (key, _) in enumerate(kwargs["dict"]):
        identifier(key, f"inputs.keywords[{place}]")


def _tell_of_classes(written: set[str], given: Iterable[type]) -> None:
    lost = written - {f"{cls.__module__}:{cls.__qualname__}" for cls in given}
    if lost:
        warn(
            f"what was of the class {', '.join(sorted(lost)[:3])} comes back as a plain dict or tuple, since a folder "
            "imports nothing. Pass the class to `load` as classes=(...,) to have it back."
        )


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    return {
        "op": node.op,
        "name": node.name,
        "target": name_of(node.target) if node.op == "call_function" else str(node.target),
        "args": _encoded(list(node.args)),
        "kwargs": {name: _encoded(value) for name, value in node.kwargs.items()},
    }


def _encoded(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_encoded(part) for part in value]
    if isinstance(value, complex):
        return {"complex": [_encoded(value.real), _encoded(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": next(name for name, known in _FLOATS.items() if value == known or name == "nan")}
    for kind, (cls, known) in _NAMED.items():
        if isinstance(value, cls) and (name := str(value).removeprefix("torch.")) in known:
            return {kind: name}
    if isinstance(value, torch.device) and value.type in _DEVICES:
        return {"device": value.type}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ArtefactError(f"the argument {value!r} has no plain form, so the standalone result cannot be saved.")


def _decoded(value: Any, nodes: Mapping[str, fx.Node], where: str) -> Any:
    if type(value) is list:
        parts = listing(lambda part, _: part, _ARGUMENTS)(value, where)
        return [_decoded(part, nodes, f"{where}[{place}]") for place, part in enumerate(parts)]
    if type(value) is dict:
        kind = next(iter(value)) if len(value) == 1 else ""
        if kind not in _DECODERS:
            raise MisfitError(where, f"an object with one of {', '.join(_DECODERS)}", value)
        return _DECODERS[kind](value[kind], nodes, where)
    return _plain(value, where)


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, float):
        return value
    return text()(value, where) if type(value) is str else integer()(value, where)


def _node(name: Any, nodes: Mapping[str, fx.Node], where: str) -> fx.Node:
    if type(name) is not str or name not in nodes:
        raise MisfitError(where, "a node before this one", name)
    return nodes[name]


def _named(kind: str) -> Callable[[Any, Mapping[str, fx.Node], str], Any]:
    known = _NAMED[kind][1]
    return lambda name, _, where: known[one_of(*known)(name, where)]


def _device(name: Any, _: Mapping[str, fx.Node], where: str) -> torch.device:
    one_of(*_DEVICES)(name, where)
    return torch.device("cpu")  # a result is loaded there


def _float(name: Any, _: Mapping[str, fx.Node], where: str) -> float:
    return _FLOATS[one_of(*_FLOATS)(name, where)]


def _complex(parts: Any, nodes: Mapping[str, fx.Node], where: str) -> complex:
    real, imag = (_decoded(part, nodes, where) for part in listing(lambda part, _: part, 2, 2)(parts, where))
    if type(real) is not float or type(imag) is not float:
        raise MisfitError(where, "two numbers", parts)
    return complex(real, imag)


_DECODERS: dict[str, Callable[[Any, Mapping[str, fx.Node], str], Any]] = {
    "node": _node,
    "float": _float,
    "complex": _complex,
    "device": _device,
    **{kind: _named(kind) for kind in _NAMED},
}
_TARGETS: dict[str, Check] = {
    "placeholder": identifier,
    "get_attr": dotted,
    "call_function": text(),
    "output": one_of("output"),
}
GRAPH_SCHEMA = record(
    format=integer(FORMAT, FORMAT),
    names=distinct(listing(identifier, _ARGUMENTS)),
    inputs=lambda value, _: value,  # `tree_from_json` looks at it
    outputs=lambda value, _: value,
    checks=listing(lambda value, _: value, _ARGUMENTS),  # and `_checks` at these
    nodes=listing(
        record(
            op=one_of(*_TARGETS),
            name=identifier,
            target=text(TEXT),
            args=listing(lambda value, _: value, _ARGUMENTS),
            kwargs=mapping(identifier, lambda value, _: value, 100),
        ),
        _NODES,
        least=1,
    ),
)
