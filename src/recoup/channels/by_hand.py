"""What the code does in no layer, and what is to become one: products by hand, and sums over hidden units."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recoup.channels.propagate import propagate
from recoup.graph.ancestry import needed
from recoup.graph.canonical import may_have_layers
from recoup.graph.capture import Captured
from recoup.labels.constraints import Constraints


def by_hand(captured: Captured) -> list[str]:
    """Nodes that multiply channels by a stored tensor, or sum up hidden units."""
    if not may_have_layers(captured):
        return []
    constraints = propagate(captured, notes_sums=True).constraints
    names = {node.name for node in needed(captured.graph)}
    return [*constraints.by_hand, *(name for name in _sums_of_units(constraints) if name in names)]


def _sums_of_units(constraints: Constraints) -> Iterator[str]:
    """Sums over channels that one layer makes alone, some of which may go.

    A stream has several makers, and is left to whoever turns it: its own channels are nearly all needed.
    """
    if not constraints.sums:
        return
    root = constraints.components()
    held = root[torch.cat([lock.labels for lock in constraints.locks] or [torch.zeros(0, dtype=torch.long)])]
    made = [root[block.start : block.start + block.count] for block in constraints.blocks]
    for node, labels in constraints.sums:
        channels = root[labels]
        makers = sum(bool(torch.isin(block, channels).any()) for block in made)
        if makers == 1 and not bool(torch.isin(channels, held).all()):
            yield node
