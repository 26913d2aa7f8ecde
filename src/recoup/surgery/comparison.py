"""Two sets of outputs, element by element: are they the same but for rounding?

A tensor may hold numbers of very different sizes, such as scores beside a mask of -1e9, in the shadow of which anything
could hide. So its elements are told apart into populations, which lie decades from each other, and every element is
measured by the median of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recoup.errors import VerificationError

# Largest allowed difference relative to the median of the population: rounding of a deep network in each precision.
TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
COARSE = 5e-2  # half precision
# A network that amplifies rounding may differ by so many times its own, in every layer anew, but never by more than the
# second number: a wrong channel shows in the first digits.
AMPLIFIED, MOST_AMPLIFIED = 100.0, 1e-3
# Where rounding alone moves a population by so much of itself, there is nothing in it to compare.
NOISE = 0.1
# Populations lie so many decades apart, and have so many members; magnitudes are sorted into bins.
GAP, MEMBERS, BINS = 3, 4, 4
LARGEST = 308.0  # decades of a float64


@dataclass(frozen=True, slots=True)
class Proof:
    """The largest relative difference that was seen, and the largest that was allowed."""

    difference: float
    allowed: float


def worse(one: Proof, other: Proof) -> Proof:
    """The proof that is nearer to its limit."""
    return max(one, other, key=lambda proof: (proof.difference / proof.allowed, proof.difference))


def compare(expected: Sequence[Any], actual: Sequence[Any], shaken: Sequence[Any] | None = None) -> Proof:
    """The largest relative difference; raises where it is more than rounding.

    `shaken` is what the original returns when its inputs move by their last digit: what rounding does to it, it may do
    to the smaller one.

    Raises:
        VerificationError: something differs, or there is nothing to compare.
    """
    _check_form(expected, actual)
    worst: Proof | None = None
    for place, (a, b) in enumerate(zip(expected, actual, strict=True)):
        moved = shaken[place] if shaken is not None else None
        if not isinstance(a, Tensor):
            _check_equal(a, b)
        elif not (a.is_floating_point() or a.is_complex()):
            _check_whole_numbers(a, b, moved)
        elif (proof := _compare_real(a, b, moved)) is not None:
            worst = proof if worst is None else worse(worst, proof)
    if worst is None:
        raise VerificationError(
            "the model returns no real numbers, or none that rounding does not change, so there is nothing to compare; "
            "it is not returned. Have the model return its scores, not classes or choices made from them."
        )
    return worst


def _check_form(expected: Sequence[Any], actual: Sequence[Any]) -> None:
    ours, theirs = ([_form(leaf) for leaf in leaves] for leaves in (expected, actual))
    if ours != theirs:
        raise VerificationError(
            f"the smaller model returns {', '.join(theirs)} where the original returns {', '.join(ours)}; it is not "
            "returned. Please report the model."
        )


def _form(leaf: Any) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _check_equal(a: Any, b: Any) -> None:
    if a != b:
        raise VerificationError(
            f"the smaller model returns {b!r} where the original returns {a!r}; it is not returned. Please report the "
            "model."
        )


def _check_whole_numbers(a: Tensor, b: Tensor, moved: Tensor | None) -> None:
    """Whole numbers are equal, but for choices that rounding changes too."""
    differs = a != b
    if moved is not None:
        differs &= a == moved
    if bool(differs.any()):
        raise VerificationError(
            f"{int(differs.sum())} of {a.numel()} whole numbers that the smaller model returns differ from the masked "
            "original's; it is not returned. Something in the forward code depends on channel numbers in a way that "
            "was not seen; please report the model."
        )


def _compare_real(a: Tensor, b: Tensor, moved: Tensor | None) -> Proof | None:
    """The comparison of two tensors of real or complex numbers; None if there is nothing to compare."""
    finite = a.isfinite()
    if not _same_infinities(a, b):
        raise VerificationError(
            "the smaller model differs from the masked original in which values are NaN or infinite; it is not "
            "returned. Please report the model."
        )
    if not bool(finite.any()):
        return None
    left, right = _wide(a[finite]), _wide(b[finite])
    population, scales = populations(left.abs())
    size = torch.maximum(left.abs(), scales[population])
    allowed = torch.full_like(scales, TOLERANCE.get(a.dtype, COARSE))
    is_noise = torch.zeros_like(scales, dtype=torch.bool)
    if moved is not None:
        rounding = _largest((left - _wide(moved[finite])).abs() / size, population, len(scales))
        is_noise = ~(rounding < NOISE)
        allowed = allowed.maximum((AMPLIFIED * rounding).clamp(max=MOST_AMPLIFIED))
    difference = _largest((left - right).abs() / size, population, len(scales))
    wrong = ~(difference <= allowed) & ~is_noise
    if bool(wrong.any()):
        first = int((difference * wrong).argmax())
        raise VerificationError(
            f"the smaller model differs from the masked original by {float(difference[first]):.1e} of the outputs' "
            f"median (allowed: {float(allowed[first]):.0e}); it is not returned. Something in the forward code depends "
            "on channel numbers in a way that was not seen; please report the model."
        )
    if bool(is_noise.all()):
        return None
    worst = int((difference / allowed).masked_fill(is_noise, -1).argmax())
    return Proof(float(difference[worst]), float(allowed[worst]))


def _same_infinities(a: Tensor, b: Tensor) -> bool:
    left, right = a[~a.isfinite()], b[~a.isfinite()]
    same = (left == right) | (left.isnan() & right.isnan())
    return bool(same.all()) and torch.equal(a.isfinite(), b.isfinite())


def populations(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The population of each of these sizes (n,), and the median size in each population; zeros go with the most."""
    positive = sizes > 0
    if not bool(positive.any()):
        return torch.zeros(sizes.shape, dtype=torch.long, device=sizes.device), sizes.new_ones(1)
    bins = (BINS * sizes.clamp(min=torch.finfo(sizes.dtype).tiny).log10()).floor().long()
    low = int(bins[positive].min())
    counts = torch.bincount(bins[positive] - low).cpu()
    occupied = counts.nonzero().squeeze(1)
    breaks = [0, *((occupied.diff() > GAP * BINS).nonzero().squeeze(1) + 1).tolist(), len(occupied)]
    runs = [occupied[a:b] for a, b in itertools.pairwise(breaks)]
    runs = _joined(runs, counts)
    of_bin = torch.zeros(len(counts), dtype=torch.long)
    scales, members = [], []
    for number, run in enumerate(runs):
        of_bin[run] = number
        reached = counts[run].cumsum(0)
        middle = int(run[int((reached * 2 >= reached[-1]).nonzero()[0])])
        scales.append(10.0 ** min((middle + low + 0.5) / BINS, LARGEST))
        members.append(int(reached[-1]))
    most = members.index(max(members))
    population = torch.where(positive, of_bin.to(sizes.device)[(bins - low).clamp(min=0)], most)
    return population, torch.tensor(scales, dtype=sizes.dtype, device=sizes.device)


def _joined(runs: list[Tensor], counts: Tensor) -> list[Tensor]:
    """Runs of bins in which there is a population: a few stray values belong to the next larger, or to the last."""
    found: list[Tensor] = []
    waiting: list[Tensor] = []
    for run in runs:
        waiting.append(run)
        if int(counts[torch.cat(waiting)].sum()) >= MEMBERS:
            found.append(torch.cat(waiting))
            waiting = []
    if waiting:
        found.append(torch.cat([*([found.pop()] if found else []), *waiting]))
    return found


def _largest(values: Tensor, population: Tensor, count: int) -> Tensor:
    """The largest value in each population."""
    return values.new_zeros(count).scatter_reduce(0, population, values, "amax")


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.double()
