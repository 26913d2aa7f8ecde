"""Trial cuts: which channels go when a model's own code is tried out at other sizes.

Groups must differ in what they lose. Were a stream of 256 channels and heads of 32 places both cut by a third, code
that reads the size of one, as `x.shape[-1] // heads` does, would pass for code that follows the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recoup.channels.structure import Group, Structure

# The share of its free channels that a trial would take of a group, unless that leaves two groups in proportion. The
# first mostly changes every number there is; chunks and slices may fit it by chance.
TARGETS = (1 / 3, 1 / 2, 1 / 5)

# The bounds of that share, and about how many counts between them are looked at.
LEAST, MOST, TRIED = 0.15, 0.6, 32


def sample_cut(structure: Structure, number: int) -> Tensor:
    """A cut of every prunable group, to an odd number if it can be: at random, in front, at the end."""
    generator, counts = torch.Generator().manual_seed(0), trial_counts(structure, number)
    keep = structure.keep_all()
    for group in structure.prunable:
        order = (
            torch.randperm(group.free, generator=generator),
            torch.arange(group.free),
            torch.arange(group.free).flip(0),
        )
        keep[group.start + group.free_in_turn(order[number])[: counts[group.name]]] = False
    return structure.refill(keep, torch.arange(structure.width))


def trial_counts(structure: Structure, number: int = 0) -> dict[str, int]:
    """How many channels a trial takes of each prunable group; groups that go together lose the same.

    What is left of a group should not be what is left of another, nor the same multiple of it as before; and it should
    be odd, which two equal halves are not.
    """
    counts: dict[str, int] = {}
    groups = [unit[0] for unit in structure.units]
    taken = {group.width: torch.zeros(group.width + 1, dtype=torch.long) for group in groups}
    for unit, group in zip(structure.units, groups, strict=True):
        alike, target = taken[group.width].tolist(), TARGETS[number] * group.free
        left = ((group.width - count, count) for count in _possible(group))
        *_, count = min((alike[kept] + (kept + 1) % 2, abs(count - target), count) for kept, count in left)
        counts |= dict.fromkeys((member.name for member in unit), count)
        for width, marks in taken.items():
            _mark(marks, width, group.width, group.width - count)
    return counts


def _possible(group: Group) -> Iterator[int]:
    """Counts that may go: some of every part, or one."""
    units = group.free // group.step
    least, most = max(1, round(LEAST * units)), max(1, round(MOST * units))
    for first in range(least, most + 1, max(1, (most - least) // TRIED)):
        yield from (group.step * count for count in (first, first + 1) if count <= most)


def _mark(taken: Tensor, width: int, other: int, kept: int) -> None:
    """Count a group that keeps `kept` of `other` channels at what is in proportion to it of a group of `width`.

    In proportion by whole numbers: the wider of the two, divided by how many times it is as wide, rounded either way.
    """
    if width % other == 0:
        times = width // other
        taken[max(0, times * (kept - 1) + 1) : times * (kept + 1)] += 1
    elif other % width == 0:
        times = other // width
        taken[kept // times : -(-kept // times) + 1] += 1
