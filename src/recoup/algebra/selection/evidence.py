"""What a selector can look at besides covariances and filters: measured when it asks, and only then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """What passes the channels of a group in the network of absolute weights, up to one factor for all of them.

    `through` (width,) is the part of the summed outputs that passes each channel when the inputs are ones,
    `importance` (width,) how much the summed outputs grow with each channel.
    """

    through: Tensor
    importance: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SingleMaps:
    """What one call of a layer reads of every channel, each map by itself.

    `values` (n, width, m, *positions) are zero where `is_read` (width, m) is false: a channel may be read at fewer
    places than others.
    """

    values: Tensor
    is_read: Tensor


class Evidence(Protocol):
    """What was seen of the channels of one group; every method measures at its first call and remembers.

    There is one map, and one gradient, for each of the problem's `readers`, in their order. A channel that a layer does
    not read is zero there.
    """

    def scales(self) -> Tensor:
        """The factors γ (width, m) of the batch norms that the channels pass; m = 0 where there is none."""
        ...

    def folded(self) -> Tensor:
        """The filters (width, f), each times the factor γ / σ of the batch norm behind it, where there is one."""
        ...

    def maps(self) -> tuple[Tensor, ...]:
        """The feature maps (n, width, *positions) that each layer reads."""
        ...

    def single_maps(self) -> tuple[SingleMaps, ...]:
        """The same maps apart: those of every call, and of every place where a layer reads the channel."""
        ...

    def gradients(self) -> tuple[Tensor, ...]:
        """The derivative of the loss of every sample with respect to what each layer reads, in the shape of `maps`."""
        ...

    def flow(self) -> Flow:
        """What passes the channels in the network of absolute weights."""
        ...
