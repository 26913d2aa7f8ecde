"""Numbers that follow the inputs: small trees of arithmetic over input sizes, as plain data.

A tree is a number; ("size", input, dim); ("rank", input); ("input", input), for an input that is a number itself; or
the name of a function with trees for its arguments. It is evaluated for a call, written into a graph, or shown.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

Tree: TypeAlias = Any  # int | float | tuple[str, *Tree]: mypy knows no recursive alias of this form

# Every function takes what a size may be while somebody traces through it: torch's symbolic numbers too.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "pow": operator.pow,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
    "float": torch.sym_float,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "not": torch.sym_not,
}

# What torch's symbolic shapes call these, by the name of the class.
_SYMBOLIC = {
    "Add": "add",
    "Mul": "mul",
    "Pow": "pow",
    "PowByNatural": "pow",
    "FloatPow": "pow",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Max": "max",
    "Min": "min",
    "ToFloat": "float",
    "TruncToInt": "trunc",
    "TruncToFloat": "trunc",
    "FloorToInt": "floor",
    "CeilToInt": "ceil",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "and",
    "Or": "or",
    "Not": "not",
}

_SIGNS = {
    "add": "+",
    "mul": "*",
    "pow": "**",
    "floordiv": "//",
    "truediv": "/",
    "mod": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "and",
    "or": "or",
}

LEAVES = ("size", "rank", "input")
# What a leaf stands for.
Read: TypeAlias = Callable[[Tree], Any]


class NoExpressionError(ValueError):
    """A symbolic number has no tree."""


def tree_of(symbolic: Any, leaves: Mapping[Any, Tree]) -> Tree:
    """The tree of one of torch's symbolic numbers; `leaves` gives that of every symbol.

    Raises:
        NoExpressionError: it uses a function or a symbol that is not known here.
    """
    if symbolic.is_Symbol:
        if symbolic not in leaves:
            raise NoExpressionError(f"{symbolic} is no size of an input")
        return leaves[symbolic]
    if symbolic.is_Integer:
        return int(symbolic)
    if symbolic.is_Float:
        return float(symbolic)
    if symbolic in (True, False):  # sympy's own truth values are equal to Python's
        return bool(symbolic)
    name = _SYMBOLIC.get(type(symbolic).__name__)
    if name is None or not symbolic.args:
        raise NoExpressionError(f"{symbolic} cannot be written down")
    parts = [tree_of(part, leaves) for part in symbolic.args]
    tree = parts[0] if len(parts) > 1 else (name, parts[0])
    for part in parts[1:]:
        tree = (name, tree, part)
    return tree


def evaluate(tree: Tree, read: Read) -> Any:
    """The value of a tree."""
    return _folded(tree, read, lambda name, parts: FUNCTIONS[name](*parts))


def write(tree: Tree, graph: fx.Graph, read: Callable[[Tree], fx.Node]) -> Any:
    """Nodes that compute a tree, at the graph's insertion point; a tree without leaves is a number."""
    return _folded(tree, read, lambda name, parts: graph.call_function(FUNCTIONS[name], tuple(parts)))


def _folded(tree: Tree, read: Read, act: Callable[[str, list[Any]], Any]) -> Any:
    """What `act` makes of the functions of a tree, from the leaves up."""
    if not isinstance(tree, tuple):
        return tree
    if tree[0] in LEAVES:
        return read(tree)
    return act(tree[0], [_folded(part, read, act) for part in tree[1:]])


def multiplied(tree: Tree, before: int, after: int) -> Tree | None:
    """The tree of a product in which a fixed factor has changed, so that `before` becomes `after`; None for a sum."""
    factors = _factors(tree)
    fixed = math.prod(factor for factor in factors if type(factor) is int)
    new, rest = divmod(fixed * after, before) if before else (0, 1)
    if rest:
        return None
    result: Tree = new
    for factor in factors:
        if type(factor) is not int:
            result = factor if result == 1 else ("mul", result, factor)
    return result


def _factors(tree: Tree) -> list[Tree]:
    if isinstance(tree, tuple) and tree[0] == "mul":
        return [factor for part in tree[1:] for factor in _factors(part)]
    return [tree]


def shown(tree: Tree) -> str:
    """A tree as people write it: `x.shape[2] // 2 + 1`.

    >>> shown(("le", ("add", ("size", "x", 0), 1), 8))
    '(x.shape[0] + 1) <= 8'
    """
    text = str(_folded(tree, _shown_leaf, _shown_call))
    return text[1:-1] if text.startswith("(") and isinstance(tree, tuple) and tree[0] in _SIGNS else text


def _shown_leaf(leaf: Tree) -> str:
    return {"size": "{0}.shape[{1}]", "rank": "{0}.dim()", "input": "{0}"}[leaf[0]].format(*leaf[1:])


def _shown_call(name: str, parts: list[Any]) -> str:
    if name in _SIGNS:
        return f"({f' {_SIGNS[name]} '.join(str(part) for part in parts)})"
    return f"{name}({', '.join(str(part) for part in parts)})"
