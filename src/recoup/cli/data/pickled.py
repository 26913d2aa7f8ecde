"""Pickles read as data: plain values and arrays of bytes, and nothing that a pickle could otherwise build or call.

A pickle is a program. Python's own unpickler runs all of it, and even numpy's arrays alone let it read any address: an
array of objects made from bytes is a list of pointers. So this reader runs the few instructions that plain containers
and arrays need, on stand-ins of its own. Names are looked up in a list here, never imported. Time and memory grow with
the file alone: nothing is allocated by a number that the file gives, and keys are short texts, as others could take for
ever to hash or to compare.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

# Instructions in a file: CIFAR-100, written in the most long-winded way, has half as many.
MOST_STEPS = 1_000_000
# Characters in a dict's key.
LONGEST_KEY = 100
BYTE_NAMES = ("u1", "|u1", b"u1", b"|u1")


class RefusedError(Exception):
    """A pickle asks for what is no part of plain data."""


@dataclass(frozen=True, slots=True)
class Name:
    """Something a pickle refers to; it stands for itself and is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:100]


@dataclass(slots=True)
class ByteArray:
    """An array of bytes as it was pickled: filled in by the instruction after the one that makes it."""

    shape: tuple[int, ...] = ()
    content: bytes = b""
    is_column_major: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether there are as many bytes as the shape says."""
        return math.prod(self.shape) == len(self.content)


class ByteType:
    """The one type that the elements of an array may have."""


Stack: TypeAlias = list[Any]


def read_pickle(content: bytes) -> Any:
    """What `content` holds: None, numbers, text, bytes, lists, tuples, dicts with plain keys, arrays of bytes.

    Raises:
        RefusedError: it asks for anything else.
        ValueError, IndexError, KeyError, TypeError: it is no pickle, or a damaged one.
    """
    return _Reader().run(content)


# Where a container begins on the stack.
_MARK: Any = object()


class _Reader:
    """The state of a reading: a stack, and what was put aside by number."""

    def __init__(self) -> None:
        self._stack: Stack = []
        self._memo: dict[int, Any] = {}
        self._to_encode = 0

    def run(self, content: bytes) -> Any:
        self._to_encode = len(content)
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number > MOST_STEPS:
                raise ValueError(f"more than {MOST_STEPS:,} instructions")
            if opcode.name == "STOP":
                (value,) = self._stack
                return value
            self._step(opcode.name, argument)
        raise ValueError("no end")

    def _step(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        if name in _VALUES:
            self._stack.append(_VALUES[name](argument))
        elif name in _TUPLES:
            self._stack.append(tuple(self._popped(_TUPLES[name])))
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        else:
            raise RefusedError(f"the instruction {name}")

    def _popped(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise IndexError("nothing left on the stack")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        if any(value is _MARK for value in taken):
            raise ValueError("a mark in the place of a value")
        return taken

    def since_mark(self) -> list[Any]:
        taken = []
        while (value := self._stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]

    def mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def make_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self.since_mark()))

    def make_list(self, _: Any) -> None:
        self._stack.append(self.since_mark())

    def make_dict(self, _: Any) -> None:
        self._stack.append(_filled({}, self.since_mark()))

    def append(self, _: Any) -> None:
        self._extend(self._popped(1))

    def extend(self, _: Any) -> None:
        self._extend(self.since_mark())

    def _extend(self, values: list[Any]) -> None:
        _of_type(self._stack[-1], list).extend(values)

    def set_item(self, _: Any) -> None:
        pair = self._popped(2)
        _filled(_of_type(self._stack[-1], dict), pair)

    def set_items(self, _: Any) -> None:
        pairs = self.since_mark()
        _filled(_of_type(self._stack[-1], dict), pairs)

    def put(self, argument: int) -> None:
        self._memo[argument] = self._stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, argument: int) -> None:
        self._stack.append(self._memo[argument])

    def refer(self, argument: str) -> None:
        module, name = argument.split(" ", 1)
        self._stack.append(_known(Name(module, name)))

    def refer_by_stack(self, _: Any) -> None:
        module, name = self._popped(2)
        self._stack.append(_known(Name(_of_type(module, str), _of_type(name, str))))

    def call(self, _: Any) -> None:
        function, arguments = self._popped(2)
        if not isinstance(function, Name) or function not in _CALLS:
            raise RefusedError(f"a call of {function if isinstance(function, Name) else type(function).__name__}")
        made = _CALLS[function](*_of_type(arguments, tuple))
        if isinstance(made, bytes):  # text that is in the file once could be encoded a thousand times
            self._to_encode -= len(made)
            if self._to_encode < 0:
                raise ValueError("more bytes than the file has")
        self._stack.append(made)

    def build(self, _: Any) -> None:
        (state,) = self._popped(1)
        built = self._stack[-1]
        if isinstance(built, ByteArray):
            _fill(built, *_of_type(state, tuple))
        elif not isinstance(built, ByteType):  # its state says how bytes are ordered and aligned, which is nothing
            raise RefusedError(f"the state of a {type(built).__name__}")


def _filled(into: dict[Any, Any], pairs: list[Any]) -> dict[Any, Any]:
    keys = pairs[::2]
    if len(pairs) % 2 or not all(isinstance(key, (bytes, str)) and len(key) <= LONGEST_KEY for key in keys):
        raise ValueError("keys that are no short texts")
    into.update(zip(keys, pairs[1::2], strict=True))
    return into


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _known(name: Name) -> Name:
    if name not in _CALLS and name not in _NAMES:
        raise RefusedError(str(name))
    return name


def _encoded(text: str, encoding: str) -> bytes:
    """How older protocols write bytes down: as text whose characters are the bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise RefusedError("an encoding of its own")
    return _of_type(text, str).encode("latin-1")  # type: ignore[no-any-return]  # a str, just checked


def _byte_type(name: Any, *_: Any) -> ByteType:
    if name not in BYTE_NAMES:
        raise ValueError("an array of something else than bytes")
    return ByteType()


def _blank_array(*_: Any) -> ByteArray:
    return ByteArray()


def _array_of(content: Any, kind: Any, shape: Any, order: Any) -> ByteArray:
    array = ByteArray()
    _fill(array, 1, shape, kind, order == "F", content)
    return array


def _fill(array: ByteArray, _: Any, shape: Any, kind: Any, is_column_major: Any, content: Any) -> None:
    if not isinstance(kind, ByteType) or not isinstance(content, (bytes, bytearray)):
        raise ValueError("an array of something else than bytes")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("a shape that is none")
    array.shape, array.content, array.is_column_major = shape, bytes(content), bool(is_column_major)


def _same(argument: Any) -> Any:
    return argument


def _latin(argument: str) -> bytes:
    """Strings of Python 2 are bytes."""
    return argument.encode("latin-1")


_IGNORED = frozenset({"PROTO", "FRAME"})
_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"), _same),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), bytes),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _same),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _latin),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ACTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "MARK": _Reader.mark,
    "TUPLE": _Reader.make_tuple,
    "LIST": _Reader.make_list,
    "DICT": _Reader.make_dict,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.extend,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Reader.get),
    "MEMOIZE": _Reader.memoize,
    "GLOBAL": _Reader.refer,
    "STACK_GLOBAL": _Reader.refer_by_stack,
    "REDUCE": _Reader.call,
    "BUILD": _Reader.build,
}
# What pickled arrays name, under the module paths of numpy 1 and 2, and what stands for it here.
_NAMES = frozenset({Name("numpy", "ndarray")})
_CALLS: dict[Name, Callable[..., Any]] = {
    Name("_codecs", "encode"): _encoded,
    Name("numpy", "dtype"): _byte_type,
    **{Name(f"{core}.multiarray", "_reconstruct"): _blank_array for core in ("numpy.core", "numpy._core")},
    **{Name(f"{core}.numeric", "_frombuffer"): _array_of for core in ("numpy.core", "numpy._core")},
}
