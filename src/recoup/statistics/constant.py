"""Channels that were constant on the calibration images, and how far that can be trusted on others.

A channel that was constant on n samples varies, with 95 % confidence, on less than 3 / n of all samples. Few samples
say little: of the constant channels of a group, the share n / 100 is vouched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.algebra.linalg import live_rows
from recoup.channels.structure import Group
from recoup.statistics.calibrate import ENOUGH_SAMPLES, Calibration


@dataclass(frozen=True, slots=True, eq=False)
class Constants:
    """The free channels that were constant wherever they are read (bool mask over all channels).

    `samples` by group: how many its readers have seen that differ and count, up to `ENOUGH_SAMPLES`.
    """

    mask: Tensor
    samples: Mapping[str, int]

    def found(self, group: Group) -> int:
        """How many of the group's channels were constant."""
        return int(self.mask[group.channels].sum())

    def vouched(self, group: Group) -> int:
        """For how many of them there were enough samples to say that they are."""
        return self.found(group) * self.samples[group.name] // ENOUGH_SAMPLES


def constant_channels(calibration: Calibration) -> Constants:
    """What was constant on the images that were fitted to."""
    return calibration.cache("constant", "channels", lambda: _constants(calibration))


def _constants(calibration: Calibration) -> Constants:
    structure = calibration.structure
    mask = torch.zeros(structure.width, dtype=torch.bool)
    for group in structure.prunable:
        mask[group.channels] = ~_alive(calibration, group) & ~group.locked
    return Constants(mask, {group.name: _samples(calibration, group) for group in structure.prunable})


def _alive(calibration: Calibration, group: Group) -> Tensor:
    alive = torch.zeros(group.width, dtype=torch.bool)
    for name in group.consumers:
        seen = calibration.statistics[name]
        live = live_rows(seen.covariance).cpu()
        channels = seen.channel_of.cpu()[live] - group.start
        alive[channels[(channels >= 0) & (channels < group.width)]] = True
    return alive


def _samples(calibration: Calibration, group: Group) -> int:
    """Where positions are weighed, a reader may have seen fewer that count than there were samples."""
    counted = (calibration.statistics[name].moments.effective for name in group.consumers)
    return int(min(calibration.different, ENOUGH_SAMPLES, *counted))
