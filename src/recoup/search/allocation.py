"""Measured allocation: widths that cost least for the harm they do.

    n_g        channels kept of group g
    c_g(n)     relative error of the layers that read the group, from backward elimination: free, for every n
    h_g(n)     harm: divergence of the network's outputs when this group alone is cut to n, measured at two n and
               carried to the others as a power of c_g
    minimise   Σ_g h_g(n_g) + μ · cost(n)

The cost is a sum of products of widths, so for one group, the others given, it is known for every n at once: visit the
groups in turn until nothing changes. One number, μ, is then bisected until the cost is what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.structure.terms import Terms

# Losses and harms below this are none.
TINY = 1e-12
# The largest power of the loss by which harm is carried on beyond what was measured.
STEEPEST = 3.0
# Sweeps over the groups: two or three settle it, a cycle between neighbours ends here.
SWEEPS = 12
# Halvings of μ's exponent over its range: finer than one channel.
BISECTIONS = 40
# What a channel that costs nothing is taken to cost: less than any in MACs, parameters or seconds.
FREE = 1e-18


@dataclass(frozen=True, slots=True, eq=False)
class Harm:
    """What cutting a group to n channels does, for every n (width + 1,), and the fewest it may be cut to."""

    curve: Tensor
    least: int


def harm_of(loss: Tensor, measured: Mapping[int, float], least: int) -> Harm:
    """The harm at every width, from `loss` (width + 1,) and the divergence `measured` with some numbers of channels.

    Between two measurements it is a power of the loss. With more channels than that it is in proportion to the loss, as
    small errors are; with fewer the power goes on, and is one at least.
    """
    curve = loss.double().cpu().clamp(min=TINY)
    known: list[tuple[float, float]] = []
    for kept in sorted(measured, reverse=True):  # the loss grows as channels go; so does the harm, but for noise
        unit, harm = float(curve[kept]), max(measured[kept], TINY, known[-1][1] if known else 0.0)
        known = [*known, (unit, harm)] if not known or unit > known[-1][0] else [*known[:-1], (unit, harm)]
    (unit, harm), *others = known
    found, power = harm * curve / unit, 1.0
    for further, more in others:
        power = math.log(more / harm) / math.log(further / unit)
        found = torch.where(curve > unit, harm * (curve / unit) ** power, found)
        unit, harm = further, more
    found = torch.where(curve > unit, harm * (curve / unit) ** min(max(power, 1.0), STEEPEST), found)
    return Harm(torch.where(loss.cpu() > 0, found, 0.0), least)


def allocate(harms: Mapping[str, Harm], terms: Terms, allowed: float) -> dict[str, int]:
    """Channels to keep by group, with a cost of at most `allowed`; the least harm that a single μ can reach."""
    low, high = -60.0, 40.0  # exponents of 2: from "cost is nothing" to "cost is all"
    whole = terms.total({name: len(harm.curve) - 1 for name, harm in harms.items()})
    scale = whole / (max(float(harm.curve.max()) for harm in harms.values()) or 1.0)
    best = _descend(harms, terms, 2.0**high / scale)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _descend(harms, terms, 2.0**middle / scale)
        if terms.total(found) <= allowed:
            high, best = middle, found
        else:
            low = middle
    return _fill(best, harms, terms, allowed)


def _descend(harms: Mapping[str, Harm], terms: Terms, price: float) -> dict[str, int]:
    counts = {name: len(harm.curve) - 1 for name, harm in harms.items()}
    for _ in range(SWEEPS):
        before = dict(counts)
        for name, harm in harms.items():
            value = harm.curve + price * terms.along(name, counts)
            value[: harm.least] = torch.inf
            counts[name] = int(value.argmin())
        if counts == before:
            break
    return counts


def _fill(counts: dict[str, int], harms: Mapping[str, Harm], terms: Terms, allowed: float) -> dict[str, int]:
    """What is left of the budget goes to single channels, the most useful per cost first."""
    counts = dict(counts)
    total = terms.total(counts)
    while True:
        offers = []
        for name, harm in harms.items():
            n = counts[name]
            if n + 1 < len(harm.curve):
                along = terms.along(name, counts)
                cost = float(along[n + 1] - along[n])
                if total + cost <= allowed:
                    offers.append((float(harm.curve[n] - harm.curve[n + 1]) / max(cost, FREE), name, cost))
        if not offers:
            return counts
        _, name, cost = max(offers)
        counts[name] += 1
        total += cost
