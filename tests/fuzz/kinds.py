"""The table of pieces: what each one reads and gives, and the options it may be drawn with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

# What goes from piece to piece, by the shape it has: (b, c, h, w), (b, t, c), (b, c, t), (b, c, d, h, w), (b, c).
FORMS = ("image", "tokens", "signal", "volume", "vector")


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of pieces, `make(c, **options)`; of each option's values the first is the simplest.

    A module that it makes has `out`, the number of channels it gives.
    """

    name: str
    reads: str
    gives: str
    make: Callable[..., nn.Module]
    options: dict[str, tuple[Any, ...]]


KINDS: dict[str, Kind] = {}
_Module = TypeVar("_Module", bound=type[nn.Module])


def kind(reads: str, gives: str | None = None, **options: tuple[Any, ...]) -> Callable[[_Module], _Module]:
    """Enter a class into the table under its own name."""

    def enter(made: _Module) -> _Module:
        assert made.__name__ not in KINDS
        KINDS[made.__name__] = Kind(made.__name__, reads, gives or reads, made, options)
        return made

    return enter


def channel_dim(form: str) -> int:
    """Along which dim the channels lie."""
    return -1 if form in ("tokens", "vector") else 1
