"""Parts: of grouped convolutions whole ones go, or the same number of channels within every part.

A part is what one group of the convolution reads, or what it makes. Where whole parts go, all channels of a part are
tied, its inputs to its outputs. Where every part keeps as many channels, each its own, inputs and outputs go by
themselves. Channels that several convolutions divide in different ways are divided into cells, the finest division:
if every cell keeps as many channels, so does every part that consists of cells. Channels that all parts have divide
nothing. What cannot be divided evenly goes by whole parts, or stays: whichever leaves more that can go.

Pieces of equal size, as a chunk in the code makes them, are such parts too, where the code cannot be told other sizes.
Where they cannot be parts, they are left to the test that a model's own code has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from recoup.channels.rectangles import Resolution, make_rectangular, resolution
from recoup.labels.arrays import components
from recoup.labels.constraints import Constraints, Grouped


def settled(constraints: Constraints, shared: frozenset[str]) -> Resolution:
    """The final channels: rectangles, and parts that go whole or evenly; whole where a weight is `shared`."""
    _tie([grouped for grouped in constraints.grouped if grouped.weight in shared], constraints)
    state = resolution(constraints)
    _tie([grouped for grouped in constraints.grouped if _goes_whole(grouped, state)], constraints)
    best = _Settling(_copied(constraints), _tie)
    if best.run():
        held = _Settling(_copied(constraints), _hold)
        held.run()
        best = max(best, held, key=lambda settling: settling.score)
    for name in _WRITTEN:
        setattr(constraints, name, getattr(best.constraints, name))
    return best.state


# What settling adds to, or takes from.
_WRITTEN = ("couplings", "locks", "grouped", "meetings", "pieces")


def _copied(constraints: Constraints) -> Constraints:
    fresh: dict[str, Any] = {name: list(getattr(constraints, name)) for name in _WRITTEN}
    return replace(constraints, **fresh)


@dataclass(slots=True, eq=False)
class _Settling:
    """One way to settle: what does not divide evenly is tied into whole parts, or it stays (`do`)."""

    constraints: Constraints
    do: Callable[[Sequence[Grouped], Constraints], None]
    state: Resolution = field(init=False)

    def run(self) -> bool:
        """Settle; whether there was anything that does not divide evenly."""
        was_uneven = False
        while True:
            self.state = state = make_rectangular(self.constraints)
            self.constraints.pieces = _even_pieces(self.constraints, state)
            every = self.constraints.grouped
            uneven = [grouped for grouped in every if not _can_go_evenly(grouped, state)]
            uneven = uneven or _uneven(self.constraints, state)
            if whole := [grouped for grouped in every if grouped not in uneven and _goes_whole(grouped, state)]:
                _tie(whole, self.constraints)
            elif uneven:
                was_uneven = True
                self.do(uneven, self.constraints)
            else:
                return was_uneven

    @property
    def score(self) -> float:
        """How much of what layers make can go, if of every group all goes but one channel."""
        made = [torch.arange(block.start, block.start + block.count) for block in self.constraints.blocks]
        labels = torch.cat([*made, torch.zeros(0, dtype=torch.long)])
        channels, group = self.state.open(labels), groups_of(self.constraints, self.state)[labels]
        score = 0.0
        for number in group[channels >= 0].unique():
            free = channels[(group == number) & (channels >= 0)]
            score += len(free) * (1 - 1 / len(free.unique()))
        return score


def groups_of(constraints: Constraints, state: Resolution) -> Tensor:
    """For every label the first label of its group: all that one layer makes, and all that is divided into parts."""
    within = [torch.arange(block.start, block.start + block.count) for block in constraints.blocks if block.count]
    within += [channels[channels >= 0] for _, channels in _sides(constraints, state)]
    stars = [torch.stack([star[:1].expand_as(star), star]) for star in within]
    every = torch.stack([torch.arange(constraints.count), state.root])
    return components(constraints.count, torch.cat([every, *stars], dim=1))


def cells_of(constraints: Constraints, state: Resolution) -> Tensor:
    """For every label the cell of its channel, -1 for what is in no part (count,)."""
    cell = torch.zeros(constraints.count, dtype=torch.long)
    for number, channels in _sides(constraints, state):
        part = torch.zeros_like(cell)
        part[channels[channels >= 0]] = number[channels >= 0]
        cell = (cell * (int(number.max()) + 1) + part).unique(return_inverse=True)[1]
    is_divided = torch.zeros(constraints.count, dtype=torch.bool)
    for _, channels in _sides(constraints, state):
        is_divided[channels[channels >= 0]] = True
    return torch.where(is_divided, cell, -1)[state.root]


def place_in_part(parts: Tensor) -> Tensor:
    """How many of the same part come before each (n,); all that is in no part (-1) comes before everything."""
    order = parts.argsort(stable=True)
    counts = torch.bincount(parts[order] + 1)
    starts = (counts.cumsum(0) - counts)[parts[order] + 1]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - starts
    return torch.where(parts >= 0, place, -1)


def in_turn(order: Tensor, parts: Tensor) -> Tensor:
    """`order` (n,), indices of `parts`, with the first of every part before the second of any."""
    return order[place_in_part(parts[order]).argsort(stable=True)]


def evened(keep: Tensor, order: Tensor, parts: Tensor) -> Tensor:
    """`keep` (n,) with channels put back, the first in `order`, until every part has as many."""
    counts = torch.bincount(parts[keep & (parts >= 0)], minlength=max(1, int(parts.max()) + 1))
    lost = order[~keep[order] & (parts[order] >= 0)]
    filled = keep.clone()
    filled[lost[place_in_part(parts[lost]) < (counts.max() - counts)[parts[lost]]]] = True
    return filled


def spread(weight: Tensor, parts: int) -> Tensor:
    """A grouped convolution's weight (parts · a, b, ...) as that of a dense one (parts · a, parts · b, ...)."""
    if parts == 1:
        return weight
    rows, each = weight.unflatten(0, (parts, -1)), torch.arange(parts, device=weight.device)
    dense = weight.new_zeros(parts, rows.shape[1], parts, *rows.shape[2:])
    dense[each, :, each] = rows
    return dense.flatten(2, 3).flatten(0, 1)


def gathered(dense: Tensor, parts: int) -> Tensor:
    """The inverse of `spread`: what lies between parts is left out."""
    if parts == 1:
        return dense
    each = torch.arange(parts, device=dense.device)
    blocks: Tensor = dense.unflatten(1, (parts, -1)).unflatten(0, (parts, -1))
    return blocks[each, :, each].flatten(0, 1)


def _tie(whole: Sequence[Grouped], constraints: Constraints) -> None:
    """Inputs and outputs of a part go together."""
    for grouped in whole:
        constraints.grouped.remove(grouped)
        constraints.at = grouped.site
        constraints.tie(torch.cat([grouped.inputs, grouped.outputs], dim=1), grouped.reason)


def _hold(uneven: Sequence[Grouped], constraints: Constraints) -> None:
    """What cannot lose equally many of every part stays."""
    for grouped in uneven:
        state = resolution(constraints)
        for side in (grouped.inputs, grouped.outputs):
            if not _loses_evenly(side, constraints, state):
                constraints.lock(side, f"{grouped.site} divides it into groups that cannot lose equally many")


def _loses_evenly(side: Tensor, constraints: Constraints, state: Resolution) -> bool:
    channels = state.open(side)
    group, cell = groups_of(constraints, state), cells_of(constraints, state)
    return _is_common(channels) or (_is_even(channels) and _divides(group, cell, state, int(channels.max())))


def _can_go_evenly(grouped: Grouped, state: Resolution) -> bool:
    """Whether parts of what it reads, and of what it makes, have as many channels: their own, or all the same."""
    return _is_even(state.open(grouped.inputs)) and _is_even(state.open(grouped.outputs))


def _goes_whole(grouped: Grouped, state: Resolution) -> bool:
    """Whether whole parts are to go though it could go evenly: there are more of them than channels in one."""
    if not _can_go_evenly(grouped, state):
        return False
    inputs, outputs = state.open(grouped.inputs), state.open(grouped.outputs)
    size, is_free = max(_different(inputs), _different(outputs)), (torch.cat([inputs, outputs], dim=1) >= 0).all(dim=1)
    return size < 2 or (bool(is_free.any()) and size < len(inputs))


def _different(channels: Tensor) -> int:
    """How many channels of a part (parts, n) may go; -1 are none."""
    return int((channels[0].unique() >= 0).sum())


def _is_common(channels: Tensor) -> bool:
    """Whether every part (parts, n) has the same channels: whatever goes, each loses as many."""
    rows = channels.sort(dim=1).values
    return bool((rows == rows[:1]).all())


def _is_even(channels: Tensor) -> bool:
    """Whether every part (parts, n) has as many channels, each at as many places, and none is in two parts, or all."""
    if _is_common(channels):
        return True
    rows = [row[row >= 0].unique(return_counts=True) for row in channels]
    times = torch.cat([counts for _, counts in rows])
    is_apart = len(torch.cat([names for names, _ in rows]).unique()) == len(times)
    return is_apart and len({len(names) for names, _ in rows}) == 1 and len(times.unique()) <= 1


def _uneven(constraints: Constraints, state: Resolution) -> list[Grouped]:
    """Convolutions that read or make channels of a group that the parts of all of them do not divide evenly."""
    group, cell = groups_of(constraints, state), cells_of(constraints, state)
    return [
        grouped
        for grouped in constraints.grouped
        for channels in (state.open(grouped.inputs), state.open(grouped.outputs))
        if not _is_common(channels) and not _divides(group, cell, state, int(channels.max()))
    ][:1]


def _even_pieces(constraints: Constraints, state: Resolution) -> list[Tensor]:
    """The pieces that are parts: different channels, equally many, in groups that all their parts divide evenly."""
    found = list[Tensor]()
    for pieces in constraints.pieces:
        channels = state.open(pieces)
        if bool((channels >= 0).all()) and _is_even(channels):
            tried = replace(constraints, pieces=[*found, pieces])
            group, cell = groups_of(tried, state), cells_of(tried, state)
            if _divides(group, cell, state, int(channels.max())):
                found.append(pieces)
    return found


def _divides(group: Tensor, cell: Tensor, state: Resolution, channel: int) -> bool:
    """Whether all cells of a channel's group have as many channels, and every free channel of it lies in one."""
    every = torch.arange(len(group))
    members = every[(group == group[channel]) & (state.root == every) & (state.open(every) >= 0)]
    sizes = cell[members].unique(return_counts=True)[1]
    return bool((cell[members] >= 0).all()) and len(sizes.unique()) == 1 and int(sizes[0]) > 1


def _sides(constraints: Constraints, state: Resolution) -> Iterator[tuple[Tensor, Tensor]]:
    """What every convolution reads and makes, and what code cuts in pieces: numbers of parts, from 1, and channels."""
    divided = [labels for grouped in constraints.grouped for labels in (grouped.inputs, grouped.outputs)]
    for labels in (*divided, *constraints.pieces):
        channels = state.open(labels)
        if not _is_common(channels):
            number = torch.arange(1, len(labels) + 1)[:, None].expand_as(channels)
            yield number.flatten(), channels.flatten()
