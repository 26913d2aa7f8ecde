"""Widths that cost least for the output error they cause.

    n_g        channels kept of group g
    c_g(n)     relative error of the layers that read the group, from backward elimination: free, for every n
    e_g(n)     output error of the network when this group alone is cut to n, measured at two n and carried to the
               others as a power of c_g
    minimise   Σ_g e_g(n_g) + μ · cost(n)

The cost is a sum of products of widths, so for one group, the others given, it is known for every n at once: visit the
groups in turn until nothing changes. One number, μ, is then bisected until the cost is what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Losses and errors below this are none.
TINY = 1e-12
# The largest power of the loss by which the error is carried on beyond what was measured.
STEEPEST = 3.0
# Sweeps over the groups: two or three settle it, a cycle between neighbours ends here.
SWEEPS = 12
# Halvings of μ's exponent over its range: finer than one channel.
BISECTIONS = 40
# What a channel that costs nothing is taken to cost: less than any in MACs, parameters or seconds.
FREE = 1e-18


@dataclass(frozen=True, slots=True, eq=False)
class ErrorCurve:
    """The output error of a group cut to n channels, for every n (width + 1,), and between which n it may be cut."""

    errors: Tensor
    least: int
    most: int

    @property
    def width(self) -> int:
        """How many channels the group has."""
        return len(self.errors) - 1


class Costs(Protocol):
    """What widths cost, all together and along one group."""

    def total(self, counts: Mapping[str, int], /) -> float:
        """The cost when every group keeps so many channels."""
        ...

    def along(self, name: str, counts: Mapping[str, int], /) -> Tensor:
        """The part of it that depends on one group, for every number of its channels (width + 1,)."""
        ...


def error_curve(loss: Tensor, measured: Mapping[int, float], least: int, most: int | None = None) -> ErrorCurve:
    """The error at every width, from `loss` (width + 1,) and the output error `measured` with some numbers of channels.

    Between two measurements it is a power of the loss. With more channels than that it is in proportion to the loss, as
    small errors are; with fewer the power goes on, and is one at least.
    """
    curve = loss.double().cpu().clamp(min=TINY)
    known: list[tuple[float, float]] = []
    for kept in sorted(measured, reverse=True):  # the loss grows as channels go; so does the error, but for noise
        unit, error = float(curve[kept]), max(measured[kept], TINY, known[-1][1] if known else 0.0)
        known = [*known, (unit, error)] if not known or unit > known[-1][0] else [*known[:-1], (unit, error)]
    (unit, error), *others = known
    found, power = error * curve / unit, 1.0
    for further, more in others:
        power = math.log(more / error) / math.log(further / unit)
        found = torch.where(curve > unit, error * (curve / unit) ** power, found)
        unit, error = further, more
    found = torch.where(curve > unit, error * (curve / unit) ** min(max(power, 1.0), STEEPEST), found)
    return ErrorCurve(torch.where(loss.cpu() > 0, found, 0.0), least, len(loss) - 1 if most is None else most)


def cheapest(curves: Mapping[str, ErrorCurve], costs: Costs, allowed: float) -> dict[str, int]:
    """Channels to keep by group, with a cost of at most `allowed`; the least error that a single μ can reach."""
    low, high = -60.0, 40.0  # exponents of 2: from "cost is nothing" to "cost is all"
    whole = costs.total({name: curve.width for name, curve in curves.items()})
    scale = whole / (max(float(curve.errors.max()) for curve in curves.values()) or 1.0)
    best = _descend(curves, costs, 2.0**high / scale)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _descend(curves, costs, 2.0**middle / scale)
        if costs.total(found) <= allowed:
            high, best = middle, found
        else:
            low = middle
    return _fill(best, curves, costs, allowed)


def _descend(curves: Mapping[str, ErrorCurve], costs: Costs, price: float) -> dict[str, int]:
    counts = {name: curve.most for name, curve in curves.items()}
    for _ in range(SWEEPS):
        before = dict(counts)
        for name, curve in curves.items():
            value = curve.errors + price * costs.along(name, counts)
            value[: curve.least] = torch.inf
            value[curve.most + 1 :] = torch.inf
            counts[name] = int(value.argmin())
        if counts == before:
            break
    return counts


def _fill(counts: dict[str, int], curves: Mapping[str, ErrorCurve], costs: Costs, allowed: float) -> dict[str, int]:
    """What is left of the budget goes to single channels, the most useful per cost first.

    Among those that are of no use, such as channels that were constant, the groups that have lost most come first.
    """
    counts = dict(counts)
    total = costs.total(counts)
    while True:
        offers = []
        for name, curve in curves.items():
            n = counts[name]
            if n < curve.most:
                along = costs.along(name, counts)
                cost = float(along[n + 1] - along[n])
                if total + cost <= allowed:
                    gain = float(curve.errors[n] - curve.errors[n + 1]) / max(cost, FREE)
                    offers.append((gain, -n / curve.width, name, cost))
        if not offers:
            return counts
        *_, name, cost = max(offers)
        counts[name] += 1
        total += cost
