"""From a share of channels to the mask that keeps the best of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from recoup.algebra.selection import Ranking
from recoup.structure.groups import Group, Structure

# A share such as 0.7 of 10 channels is 7 of them, though 0.7 * 10 > 7 in floating point.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Widths:
    """Turns shares into masks: the ranking of every group, and the dead channels that go in any case."""

    structure: Structure
    rankings: Mapping[str, Ranking]
    dead: Tensor

    def keep(self, groups: Iterable[Group], share: float, start: Tensor) -> Tensor:
        """`start` with each of `groups` cut to the best `share` of its free channels; no layer is left empty."""
        keep = start.clone()
        for group in groups:
            order = self.rankings[group.name].order.cpu() + group.start
            count = group.width - group.free + math.ceil(share * group.free - ROUNDING)
            keep[group.channels] = False
            keep[order[:count]] = True
            keep = self.structure.refill(keep & ~self.dead, order)
        return keep
