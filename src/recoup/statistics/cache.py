"""What was computed for a calibration and may be asked for again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

# Results of one kind that stay: a search only ever returns to the last ones.
MOST = 4


class Cache:
    """Results by kind and key; of every kind the last few."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, dict[Hashable, Any]] = {}

    def __call__(self, kind: Hashable, key: Hashable, make: Callable[[], T], most: int = MOST) -> T:
        """The result of that kind for the key, made by `make` if it is not there."""
        known = self._kinds.setdefault(kind, {})
        if key not in known:
            made = make()
            while len(known) >= most:
                del known[next(iter(known))]
            known[key] = made
        result: T = known.pop(key)
        known[key] = result  # what was asked for last goes last
        return result
