"""Whether two results agree, element by element; nothing here is the library's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Differences allowed in float64 and float32, relative to an element and to the spread of its tensor.
PRECISE, COARSE = 1e-8, 2e-3
# Inputs are moved by so much to see which elements hang on a tie or a threshold.
SHAKE = {torch.float64: 1e-11, torch.float32: 1e-6}
# Where more than this share of the elements hang on ties, nothing can be said.
UNDECIDED = 0.5
# What float32 makes of an output that does not vary, over a few layers.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Difference:
    """What is wrong with a result, or None; `compared` counts the elements that were looked at."""

    what: str | None
    compared: int


def flat(value: Any) -> list[Any]:
    """Leaves of a result, None among them, in the order of the caller's code."""
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in flat(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in flat(part)]
    return [value]


def form_of(value: Any) -> Any:
    """What a result is made of, without its numbers."""
    if isinstance(value, dict):
        return {key: form_of(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__ in ("list", "tuple"), *(form_of(part) for part in value)]
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def compare(expected: Any, actual: Any, allowed: float, shaken: Callable[[], Any]) -> Difference:
    """The first difference; `shaken()` gives what is expected for inputs that were moved by their last digits."""
    if form_of(expected) != form_of(actual):
        return Difference(f"returns {form_of(actual)} in the place of {form_of(expected)}", 0)
    pairs = list(zip(flat(expected), flat(actual), strict=True))
    moved: list[Any] = []
    compared = 0
    for place, (a, b) in enumerate(pairs):
        if not isinstance(a, Tensor):
            if a != b:
                return Difference(f"result {place} is {b!r} in the place of {a!r}", compared)
            continue
        wrong = _wrong(a, b, allowed)
        if bool(wrong.any()):
            moved = moved or flat(shaken())
            ties = _wrong(a, moved[place], allowed / 10)
            wrong &= ~ties
            compared -= int(ties.sum())
            if bool(wrong.any()) and float(ties.double().mean()) <= UNDECIDED:
                return Difference(_describe(a, b, wrong, place), compared)
        compared += a.numel()
    return Difference(None, compared)


def relative_error(expected: Any, actual: Any) -> float:
    """The largest error of an output, relative to its spread over the samples, or to rounding where it has none."""
    worst = 0.0
    for a, b in zip(flat(expected), flat(actual), strict=True):
        if isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex()) and a.dim():
            a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
            there = a.abs() < 1e8  # what is filled in says nothing of the rest
            least = max(1e-12, ROUNDING * float(a[there].double().norm()))
            spread = (a - a.mean(0, keepdim=True))[there].double().norm().clamp(min=least)
            worst = max(worst, float((a - b)[there].double().norm() / spread))
    return worst


def _wrong(a: Tensor, b: Tensor, allowed: float) -> Tensor:
    """Elements that differ by more than `allowed`, of themselves and of the usual spread."""
    if a.is_complex():
        return _wrong(torch.view_as_real(a), torch.view_as_real(b), allowed).any(-1)
    if not a.is_floating_point():
        return a != b
    a, b = a.double(), b.double()
    scale = a.abs() + _spread(a)
    return ~((a == b) | ((a - b).abs() <= allowed * scale) | (a.isnan() & b.isnan()))


def _spread(a: Tensor) -> float:
    """The median distance of elements from the median over the samples: what is filled in does not count."""
    if not a.numel() or not a.dim():
        return 1e-3
    distance = (a - a.median(0, keepdim=True).values).abs() if len(a) > 1 else (a - a.median()).abs()
    distance = distance[distance > 0]
    return float(distance.median()) if distance.numel() else float(a.abs().median())


def _describe(a: Tensor, b: Tensor, wrong: Tensor, place: int) -> str:
    index = tuple(int(n) for n in wrong.nonzero()[0])
    share = float(wrong.double().mean())
    return f"result {place} of shape {tuple(a.shape)}: {share:.0%} wrong, at {index} {b[index]!s} for {a[index]!s}"
