"""Numbers as people read them."""

from __future__ import annotations

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# From here on three digits round up to the next suffix: 999,500 is 1.00 M, not 1000 k.
_ROUNDS_UP = 0.9995


def short(number: int) -> str:
    """Three digits and a suffix: 3,034,368 is 3.03 M."""
    for size, suffix in _SUFFIXES:
        if number >= _ROUNDS_UP * size:
            return f"{number / size:#.3g}".rstrip(".") + f" {suffix}"
    return str(number)


def duration(seconds: float) -> str:
    """Three digits and a unit: 0.01234 is 12.3 ms."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= _ROUNDS_UP * size), _UNITS[-1])
    return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
