"""A schema for JSON: each check takes a value and the place it stands at, and returns it or says what is wrong.

Checks are plain functions that are put together:

    record(width=integer(1, 4096), kept=listing(integer(0, 4095)), note=optional(text()))

A bool is no integer, a record has its fields and no others, and nothing is converted.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any, str], Any]

# What fits into torch's own integers.
LEAST, MOST = -(2**63), 2**63 - 1
# Longer than any name or message we write, far shorter than what would hurt.
TEXT = 4_000
ENTRIES = 1_000_000

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,500}", re.ASCII)
# What ends a string in source code; module names may have any other printable character, such as those of a ModuleDict.
_QUOTES = frozenset("'\"`\\")


class MisfitError(ValueError):
    """A value that the schema does not allow, and where it stands; told to the user as an `ArtefactError`."""

    def __init__(self, where: str, expected: str, found: Any) -> None:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        super().__init__(f"{where or 'the file'} should be {expected}, and is {shown}")


def integer(least: int = LEAST, most: int = MOST) -> Check:
    """An integer in that range."""

    def check(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise MisfitError(where, f"an integer from {least} to {most}", value)
        return value

    return check


def real(least: float = float("-inf"), most: float = float("inf")) -> Check:
    """A finite number in that range."""

    def check(value: Any, where: str) -> float:
        if type(value) not in (int, float) or not least <= value <= most or value in (float("inf"), float("-inf")):
            raise MisfitError(
                where, "a finite number" + (f" from {least:g} to {most:g}" if most < 1e300 else ""), value
            )
        return float(value)

    return check


def flag(value: Any, where: str) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise MisfitError(where, "true or false", value)
    return value


def number_or_flag(value: Any, where: str) -> int | bool:
    """True, false, or an integer that counts something."""
    return flag(value, where) if type(value) is bool else int(integer(0)(value, where))


def text(most: int = TEXT) -> Check:
    """A string that is not too long."""

    def check(value: Any, where: str) -> str:
        if type(value) is not str or len(value) > most:
            raise MisfitError(where, f"a text of at most {most} characters", value)
        return value

    return check


def identifier(value: Any, where: str) -> str:
    """A name as Python knows it, in ASCII; no keyword, and none of the names with two underscores at each end."""
    if type(value) is not str or not _IDENTIFIER.fullmatch(value) or keyword.iskeyword(value) or _is_dunder(value):
        raise MisfitError(where, "a plain identifier", value)
    return value


def dotted(value: Any, where: str) -> str:
    """A name of a tensor or a module: parts such as `0` or `conv1` with dots between."""
    parts = value.split(".") if type(value) is str and len(value) <= TEXT else [""]
    if not all(part and part.isprintable() and not _QUOTES & set(part) and not _is_dunder(part) for part in parts):
        raise MisfitError(where, "a dotted name", value)
    return str(value)


def one_of(*allowed: str) -> Check:
    """One of these texts."""

    def check(value: Any, where: str) -> str:
        if type(value) is not str or value not in allowed:
            raise MisfitError(where, f"one of {', '.join(allowed[:20])}", value)
        return value

    return check


def matching(pattern: str, expected: str) -> Check:
    """A text of that form, all of it."""
    form = re.compile(pattern, re.ASCII)

    def check(value: Any, where: str) -> str:
        if type(value) is not str or len(value) > TEXT or not form.fullmatch(value):
            raise MisfitError(where, expected, value)
        return value

    return check


def optional(of: Check) -> Check:
    """Null, or what `of` allows."""
    return lambda value, where: None if value is None else of(value, where)


def listing(of: Check, most: int = ENTRIES, least: int = 0) -> Check:
    """A list of such things."""

    def check(value: Any, where: str) -> list[Any]:
        if type(value) is not list or not least <= len(value) <= most:
            raise MisfitError(where, f"a list of {least} to {most} entries", value)
        return [of(part, f"{where}[{place}]") for place, part in enumerate(value)]

    return check


def mapping(key: Check, of: Check, most: int = ENTRIES) -> Check:
    """An object with any keys that `key` allows."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict or len(value) > most:
            raise MisfitError(where, f"an object of at most {most} entries", value)
        return {key(name, f"a key of {where}"): of(part, f"{where}.{name[:80]}") for name, part in value.items()}

    return check


def record(**fields: Check) -> Check:
    """An object with exactly these fields."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict or value.keys() != fields.keys():
            found = sorted(value) if type(value) is dict else value
            raise MisfitError(where, f"an object with the fields {', '.join(fields)}", found)
        return {name: of(value[name], f"{where}.{name}" if where else name) for name, of in fields.items()}

    return check


def ascending(value: Any, where: str) -> list[int]:
    """Places of what is kept: integers from zero up, each larger than the one before."""
    kept: list[int] = listing(integer(0))(value, where)
    for place in range(1, len(kept)):
        if kept[place] <= kept[place - 1]:
            raise MisfitError(f"{where}[{place}]", f"an integer above {kept[place - 1]}", kept[place])
    return kept


def distinct(of: Check) -> Check:
    """A list in which nothing stands twice."""

    def check(value: Any, where: str) -> list[Any]:
        parts: list[Any] = of(value, where)
        seen: set[Any] = set()
        for place, part in enumerate(parts):
            if part in seen:
                raise MisfitError(f"{where}[{place}]", "there only once", part)
            seen.add(part)
        return parts

    return check


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
