"""How the inputs and outputs of a graph are packed, as plain data: tuples, lists and dicts, written and read by us.

A leaf is "*". A class that torch can flatten, such as a named tuple or the outputs of Hugging Face's models, is written
as the tuple or dict it amounts to, with its name. It comes back as that class only if the caller hands the class over:
a name in a file imports nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from recoup.artefact.schema import LEAST, MOST, MisfitError, listing, text
from recoup.errors import ArtefactError

LEAF = "*"
_PARTS = 100_000


class Leaf:
    """Stands for a value in a tree; no container, so that nothing looks into it."""


def tree_to_json(spec: TreeSpec) -> Any:
    """Plain data.

    Raises:
        ArtefactError: a class is none of those above.
    """
    leaves = [Leaf() for _ in range(spec.num_leaves)]
    found: list[Leaf] = []
    try:
        tree = _written(tree_unflatten(leaves, spec), found)
    except Exception as error:  # classes that are put together again may raise anything
        raise _without_form(error) from error
    if found != leaves:
        raise _without_form("its parts come in another order than its fields")
    return tree


def tree_from_json(value: Any, where: str, classes: Iterable[type] = ()) -> TreeSpec:
    """The tree that plain data stands for; what was one of `classes` is one again.

    Raises:
        MisfitError: it is no tree.
        ArtefactError: one of `classes` does not take what was saved.
    """
    return tree_structure(_read(value, where, {class_name(cls): cls for cls in classes}))


def classes_in(value: Any) -> set[str]:
    """Names of the classes that were written as tuples and dicts, in data that was read before."""
    if not isinstance(value, dict):
        return set()
    inner: list[Any] = [tree for _, tree in value.get("dict", ())] + value.get("tuple", []) + value.get("list", [])
    own = {value["class"]} if "class" in value else set()
    return own.union(*(classes_in(part) for part in inner))


def class_name(cls: type) -> str:
    """Module and qualified name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _written(value: Any, found: list[Leaf]) -> Any:
    if isinstance(value, Leaf):
        found.append(value)
        return LEAF
    note = {} if type(value) in (tuple, list, dict) else {"class": class_name(type(value))}
    if type(value) is list:
        return {"list": [_written(part, found) for part in value]}
    if isinstance(value, tuple):
        return {"tuple": [_written(part, found) for part in value], **note}
    if isinstance(value, Mapping):
        pairs = [(_key(key), part) for key, part in value.items()]
    elif dataclasses.is_dataclass(value):
        pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        pairs = [(name, part) for name, part in pairs if part is not None]
    else:
        raise TypeError(f"{type(value).__name__} is neither a tuple nor a dict")
    return {"dict": [[key, _written(part, found)] for key, part in pairs], **note}


def _key(key: Any) -> str | int:
    if type(key) is str or (type(key) is int and LEAST <= key <= MOST):
        return key
    raise TypeError(f"the key {key!r} is neither a text nor an integer")


def _read(value: Any, where: str, classes: Mapping[str, type]) -> Any:
    if value == LEAF:
        return Leaf()
    kind = next(iter(value), "") if isinstance(value, dict) else ""
    if kind not in ("tuple", "list", "dict") or not {kind} <= value.keys() <= {kind, "class"}:
        raise MisfitError(where, 'a tree of "*", tuple, list and dict', value)
    cls = classes.get(text()(value["class"], f"{where}.class")) if "class" in value else None
    parts = listing(lambda part, _: part, _PARTS)(value[kind], f"{where}.{kind}")
    if kind == "dict":
        return _made(dict if cls is None else cls, _pairs(parts, where, classes))
    inner = [_read(part, f"{where}[{place}]", classes) for place, part in enumerate(parts)]
    return inner if kind == "list" else _made(tuple if cls is None else cls, inner)


def _pairs(parts: list[Any], where: str, classes: Mapping[str, type]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for place, pair in enumerate(parts):
        here = f"{where}[{place}]"
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in found:
            raise MisfitError(here, "a new key and its tree", pair)
        found[pair[0]] = _read(pair[1], f"{here}.{str(pair[0])[:80]}", classes)
    return found


def _made(cls: Callable[..., Any], parts: Any) -> Any:
    if cls in (tuple, dict):
        return cls(parts)
    try:
        made = cls(**parts) if isinstance(parts, dict) else cls(*parts)
        expected = [*parts.values()] if isinstance(parts, dict) else parts
        if len(tree_flatten(made)[0]) == len(tree_flatten(expected)[0]):
            return made
        raise TypeError("torch does not know how to flatten it")
    except Exception as error:  # the caller's class
        raise ArtefactError(
            f"{getattr(cls, '__name__', cls)} cannot hold what was saved ({error}). Leave it out of classes=."
        ) from error


def _without_form(error: object) -> ArtefactError:
    return ArtefactError(
        f"what the model takes or returns has no plain form ({error}). Return tensors in tuples, lists or dicts with "
        "names for keys."
    )
