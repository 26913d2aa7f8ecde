"""From a share of channels to the mask that keeps the best of them, at widths the hardware likes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recoup.algebra.selection import Ranking
from recoup.channels.structure import Group, Structure
from recoup.config import Limits, multiple_on
from recoup.statistics.calibrate import Calibration
from recoup.statistics.constant import Constants, constant_channels

# A share such as 0.7 of 10 channels is 7 of them, though 0.7 * 10 > 7 in floating point.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Widths:
    """Turns shares into masks: the ranking of every group, in which channels that were constant come last.

    Every layer makes a multiple of `multiple_of` outputs, or as many as it did: the next best channels stay for that.
    A group keeps no fewer and no more channels than the `limits` say; a width by hand is kept to the channel. Where
    constant channels are `left_out`, those that are vouched for go whatever the share; so do, always, those that the
    ranking says cannot be chosen. `spared` groups stay whole,
    unless they have a width by hand.
    """

    structure: Structure
    rankings: Mapping[str, Ranking]
    constants: Constants | None = None
    multiple_of: int = 1
    limits: Limits = field(default_factory=lambda: Limits({}))
    left_out: bool = False
    spared: frozenset[str] = frozenset()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose width is open."""
        return tuple(group for group in self.structure.prunable if not self._is_spared(group))

    def without_constants(self) -> Widths:
        """The same where constant channels go whatever the share, if there were enough samples to call them that."""
        return replace(self, left_out=True)

    def start(self) -> Tensor:
        """All channels, but for the groups that have a width by hand, and constant ones where they are left out."""
        keep = self.structure.keep_all()
        for group in self.structure.prunable:
            if self.most(group) < group.width:
                keep = self.cut(group, group.width, keep)
        return keep

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
        count = group.rounded(min(max(count, self.least(group)), self.most(group)))
        keep[group.channels] = False
        keep[order[:count]] = True
        keep = self.structure.refill(keep, order)
        return keep if group.name in self.limits.widths else self._rounded(keep, group, order)

    def least(self, group: Group) -> int:
        """The fewest channels that the group may be cut to."""
        if self._is_spared(group):
            return group.width
        return group.rounded(max(self.limits.least(group.name, group.width), group.width - group.free))

    def most(self, group: Group) -> int:
        """The most channels that it keeps."""
        most = self.limits.most(group.name, group.width)
        if group.name in {*self.limits.widths, *self.spared}:
            return most
        if self.left_out and self.constants is not None:
            most -= self.constants.vouched(group)
        choosable = self.rankings[group.name].most
        return group.rounded(max(self.least(group), most if choosable is None else min(most, choosable)))

    def doubtful(self, group: Group) -> int:
        """How many of the group's channels were constant on too few samples to say that they are."""
        return 0 if self.constants is None else self.constants.found(group) - self.constants.vouched(group)

    def order(self, group: Group) -> Tensor:
        """The group's channels, by their numbers among all channels, the best first."""
        order = self.rankings[group.name].order.cpu() + group.start
        if self.constants is not None:
            order = order[self.constants.mask[order].long().argsort(stable=True)]
        return group.in_turn(order - group.start) + group.start

    @property
    def rest(self) -> str:
        """For messages: why something is left when every group is cut as far as it may be."""
        held = ", or held by widths= and min_width=" if self.limits.widths or self.limits.min_width > 1 else ""
        rounded = f", or rounded up to multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        spared = ", or read by the classifier, which classifier=True prunes" if self.spared else ""
        return f"the rest is locked{held}{rounded}{spared}"

    def _is_spared(self, group: Group) -> bool:
        return group.name in self.spared and group.name not in self.limits.widths

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
        keep[:] = self.structure.refill(keep, order)
        return len(lost) > 0

    def _outputs(self, group: Group) -> list[Tensor]:
        """The channel of each output of every layer that makes some of the group's."""
        made = {(product.weight, product.output_dim) for product in self.structure.products}
        sites = [site.channel_of for site in self.structure.sites if (site.tensor, site.dim) in made]
        low, high = group.start, group.start + group.width
        return [of for of in sites if bool(((of >= low) & (of < high)).any())]


def widths_for(calibration: Calibration, rankings: Mapping[str, Ranking], limits: Limits | None = None) -> Widths:
    """What turns shares into masks for this calibration."""
    device = next((tensor.device.type for tensor in calibration.parameters.values()), "cpu")
    multiple_of = multiple_on(calibration.method, device)
    return Widths(calibration.structure, rankings, constant_channels(calibration), multiple_of, limits or Limits({}))
