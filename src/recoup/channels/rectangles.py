"""What propagation leaves open: along which dim channels lie when the labels of an activation change along several.

A layer's outputs viewed as (heads, places) have labels along both dims. What remains of such an activation must be a
rectangle, so channels are tied along all of its dims but one: the one along which the most can still be told apart.
Only then is it known what an operand meets that is repeated along one of these dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.labels.arrays import FIXED, NONE, compress, core, replaced, varying_dims
from recoup.labels.constraints import Computed, Constraints, Meeting

NOT_RECTANGULAR = "sees it along two dims, so what remains would not be rectangular"


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """For every label the first label of its channel (`root`), and whether some layer makes that channel (`made`)."""

    root: Tensor
    made: Tensor
    locked: Tensor

    def open(self, labels: Tensor) -> Tensor:
        """Labels as channels: NONE for all that stays in any case."""
        if not len(self.root):
            return torch.full_like(labels, NONE)
        (small,) = core(labels)
        channel = self.root[small.clamp(min=0)]
        is_open = (small >= 0) & self.made[channel] & ~self.locked[channel]
        return torch.where(is_open, channel, NONE).expand(labels.shape)

    def stays(self, labels: Tensor) -> Tensor:
        """Where labels name nothing, or something that is locked."""
        if not len(self.root):
            return torch.ones_like(labels, dtype=torch.bool)
        return (labels < 0) | self.locked[self.root[labels.clamp(min=0)]]


def make_rectangular(constraints: Constraints) -> Resolution:
    """Tie and couple until every activation that is computed with remains rectangular; the final channels."""
    while True:
        state = resolution(constraints)
        if not (_tie_boxes(constraints, state) or _hold_meetings(constraints, state)):
            return state


def resolution(constraints: Constraints) -> Resolution:
    """Channels as far as the constraints knows them."""
    root = constraints.components()
    made, locked = (torch.zeros(constraints.count, dtype=torch.bool) for _ in range(2))
    for block in constraints.blocks:
        made[root[block.start : block.start + block.count]] = True
    for lock in constraints.locks:
        locked[root[lock.labels]] = True
    return Resolution(root, made, locked)


def _tie_boxes(constraints: Constraints, state: Resolution) -> bool:
    """Tie what is not rectangular yet; whether anything was tied."""
    before = len(constraints.couplings) + len(constraints.locks)
    parameters = [Computed(labels, name) for name, labels in constraints.elements.items()]
    for box in [*constraints.boxes, *parameters]:
        (small,) = core(box.labels)
        channels = compress(state.open(small))
        dims = varying_dims(channels)
        if len(dims) > 1:
            constraints.at = box.site
            _tie_all_but_one(constraints, state, small, dims)
    return len(constraints.couplings) + len(constraints.locks) > before


def _tie_all_but_one(constraints: Constraints, state: Resolution, labels: Tensor, dims: list[int]) -> None:
    channels = state.open(labels)
    kept = max(dims, key=lambda dim: len(channels.movedim(dim, 0).flatten(1).unique(dim=0)))
    rows = labels.movedim(kept, 0).flatten(1)
    stays = state.stays(rows)
    if bool(stays.any()):
        constraints.lock(rows[stays.any(dim=1)], f"{constraints.at} {NOT_RECTANGULAR}")
    constraints.tie(torch.where(stays, NONE, rows), f"{constraints.at} {NOT_RECTANGULAR}")


def _hold_meetings(constraints: Constraints, state: Resolution) -> bool:
    """Couple operands with the channels they meet, now that these lie along one dim; whether anything changed."""
    meetings, constraints.meetings = constraints.meetings, []
    changed = False
    for meeting in meetings:
        dims = set(varying_dims(compress(state.open(meeting.channels))))
        if dims & meeting.stretched and dims - meeting.stretched:
            constraints.meetings.append(meeting)  # cannot happen once boxes are tied, as the meeting's result is a box
            continue
        changed |= _hold(constraints, meeting, dims)
    return changed


def _hold(constraints: Constraints, meeting: Meeting, dims: set[int]) -> bool:
    before = len(constraints.couplings) + len(constraints.locks)
    if dims - meeting.stretched:
        constraints.couple(replaced(meeting.operand, NONE, FIXED), meeting.channels, meeting.reason)
    elif dims & meeting.stretched:
        constraints.lock(meeting.operand, meeting.reason)
    return len(constraints.couplings) + len(constraints.locks) > before
