"""From a share of channels to the mask that keeps the best of them, at widths the hardware likes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.algebra.selection import Ranking
from recoup.structure.groups import Group, Structure

# A share such as 0.7 of 10 channels is 7 of them, though 0.7 * 10 > 7 in floating point.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Widths:
    """Turns shares into masks: the ranking of every group, and the dead channels that go in any case.

    Every layer makes a multiple of `multiple_of` outputs, or as many as it did: the next best channels stay for that.
    """

    structure: Structure
    rankings: Mapping[str, Ranking]
    dead: Tensor
    multiple_of: int = 1

    def keep(self, groups: Iterable[Group], share: float, start: Tensor) -> Tensor:
        """`start` with each of `groups` cut to the best `share` of its free channels; no layer is left empty."""
        keep = start
        for group in groups:
            count = group.width - group.free + math.ceil(share * group.free - ROUNDING)
            keep = self.cut(group, count, keep)
        return keep

    def cut(self, group: Group, count: int, start: Tensor) -> Tensor:
        """`start` with `group` cut to the best `count` channels, or a few more where a layer needs them."""
        keep, order = start.clone(), self.order(group)
        keep[group.channels] = False
        keep[order[:count]] = True
        # Where a layer is dead as a whole, `dead` spares a channel: the next cut must find that one and no other.
        spared_first = order[self.dead[order].long().argsort(stable=True)]
        keep = self.structure.refill(keep & ~self.dead, spared_first)
        return self._rounded(keep, group, order)

    def order(self, group: Group) -> Tensor:
        """The group's channels, by their numbers among all channels, the best first."""
        return self.rankings[group.name].order.cpu() + group.start

    def _rounded(self, keep: Tensor, group: Group, order: Tensor) -> Tensor:
        """`keep` with channels put back until every layer's outputs are a multiple."""
        if self.multiple_of == 1:
            return keep
        outputs = self._outputs(group)
        while any(self._put_one_back(keep, channel_of, order) for channel_of in outputs):
            pass
        return keep

    def _put_one_back(self, keep: Tensor, channel_of: Tensor, order: Tensor) -> bool:
        """Keep the best of a layer's lost channels after all if its outputs are no multiple; whether one was."""
        if int(self.structure.keep_indices(channel_of, keep).sum()) % self.multiple_of == 0:
            return False
        lost = order[~keep[order] & torch.isin(order, channel_of)]
        keep[lost[:1]] = True
        return len(lost) > 0

    def _outputs(self, group: Group) -> list[Tensor]:
        """The channel of each output of every layer that makes some of the group's."""
        made = {(product.weight, product.output_dim) for product in self.structure.products}
        sites = [site.channel_of for site in self.structure.sites if (site.tensor, site.dim) in made]
        low, high = group.start, group.start + group.width
        return [of for of in sites if bool(((of >= low) & (of < high)).any())]
