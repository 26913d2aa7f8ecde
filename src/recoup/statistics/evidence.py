"""What the selectors of a calibration may look at: measured for all groups at once, when the first of them asks."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, fx

from recoup.algebra.selection import Flow, SingleMaps
from recoup.algebra.selection.elimination import rows_by_channel
from recoup.channels.structure import Consumer, Group
from recoup.operators.names import operation_name
from recoup.operators.record import operator_of
from recoup.statistics.calibrate import Calibration, watched
from recoup.statistics.flow import LayerFlow, flows
from recoup.statistics.makers import filters_of, scales_of
from recoup.statistics.maps import SeenMaps

# Operations behind which elements are in the same order: they only forget, or restore, where dims begin.
_SAME_ORDER = ("flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "dropout", "clone", "contiguous")


class SharedEvidence:
    """What was measured of a calibration, for all of its groups."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.seen = SeenMaps(calibration)

    @cached_property
    def flow(self) -> dict[str, list[LayerFlow]]:
        """What passes every layer in the network of absolute weights, by the name of its weight."""
        weights = [consumer.weight for consumer in watched(self.calibration.structure)]
        return flows(self.calibration.traced.standalone.captured, weights)

    def of(self, group: Group) -> GroupEvidence:
        """The part of a group."""
        return GroupEvidence(self, group)


class GroupEvidence:
    """The evidence of one group; see `recoup.algebra.selection.Evidence`."""

    def __init__(self, shared: SharedEvidence, group: Group) -> None:
        self._shared, self._group = shared, group

    def scales(self) -> Tensor:
        """The factors γ (width, m) of the batch norms that the channels pass."""
        return scales_of(self._shared.calibration, self._group).to(self._device)

    def folded(self) -> Tensor:
        """The filters (width, f) times the factors of the batch norms behind them."""
        return filters_of(self._shared.calibration, self._group, folded=True).to(self._device)

    def maps(self) -> tuple[Tensor, ...]:
        """What each layer reads of the channels (n, width, *positions)."""
        found = self._shared.seen.maps()
        return tuple(self._together(consumer, found[consumer.name]) for consumer in self._consumers)

    def single_maps(self) -> tuple[SingleMaps, ...]:
        """What every call of a layer reads of the channels, map by map."""
        found = self._shared.seen.maps()
        return tuple(self._apart(consumer, call) for consumer in self._consumers for call in found[consumer.name])

    def gradients(self) -> tuple[Tensor, ...]:
        """The derivatives of the loss, in the shape of `maps`."""
        found = self._shared.seen.gradients()
        return tuple(self._together(consumer, found[consumer.name]) for consumer in self._consumers)

    def flow(self) -> Flow:
        """What passes the channels in the network of absolute weights, over all layers that read them."""
        calls = [(consumer, call) for consumer in self._consumers for call in self._shared.flow[consumer.weight]]
        # ∂R/∂a = ∂r/∂m · exp(L - l): of the factors only their ratios count, and none of them exceeds 1.
        least = torch.stack([call.log for _, call in calls]).amin()
        through = [self._summed(consumer, call.mantissa * call.derivative) for consumer, call in calls]
        importance = [self._summed(consumer, call.derivative * (least - call.log).exp()) for consumer, call in calls]
        return Flow(torch.stack(through).sum(dim=0), torch.stack(importance).sum(dim=0))

    @property
    def _consumers(self) -> tuple[Consumer, ...]:
        return self._shared.calibration.structure.consumers_of(self._group)

    @property
    def _device(self) -> torch.device:
        return self._shared.calibration.split.device

    def _summed(self, consumer: Consumer, value: Tensor) -> Tensor:
        """A value (1, inputs, *positions) summed by channel (width,)."""
        return _by_channel(consumer, self._group, value).values.flatten(2).sum(dim=(0, 2))

    def _together(self, consumer: Consumer, calls: list[Tensor]) -> Tensor:
        """All that a layer reads of the channels (n, width, *positions); of several maps the first position is which.

        Of several calls, the positions of one lie behind those of the other.
        """
        values = [self._apart(consumer, call).values for call in calls]
        if len(values) > 1:
            return torch.cat([each.flatten(2) for each in values], dim=2)
        return values[0].squeeze(2) if values[0].shape[2] == 1 else values[0]

    def _apart(self, consumer: Consumer, call: Tensor) -> SingleMaps:
        """What a call reads (n, k, inputs, *positions) of each channel, map by map."""
        parts = call.shape[1]
        found = _by_channel(consumer, self._group, call.movedim(1, 2))
        values, is_read = found.values.flatten(2, 3), found.is_read.repeat_interleave(parts, dim=1)
        if values.dim() > 3 or values.shape[2] == 1 or parts > 1:
            return SingleMaps(values, is_read)
        positions = _flattened_positions(self._shared.calibration, consumer)
        size = max(1, math.prod(positions))
        if size == 1 or bool((is_read.sum(dim=1) % size).any()):
            return SingleMaps(values, is_read)
        return SingleMaps(values.unflatten(2, (-1, *positions)), is_read[:, ::size])


def _by_channel(consumer: Consumer, group: Group, value: Tensor) -> SingleMaps:
    """What a layer reads (n, inputs, *positions) of each channel, (n, width, r, *positions); zero where it reads less.

    A layer behind a flattened map, or one that reads heads, reads a channel at several inputs.
    """
    local = consumer.inputs - group.start
    local = torch.where((local >= 0) & (local < group.width), local, -1).to(value.device)
    rows, is_row = rows_by_channel(local, group.width, torch.ones_like(local, dtype=torch.bool))
    mask = is_row.reshape(*is_row.shape, *[1] * (value.dim() - 2)).to(value.dtype)
    return SingleMaps(value[:, rows] * mask, is_row)


def _flattened_positions(calibration: Calibration, consumer: Consumer) -> tuple[int, ...]:
    """The positions of the map that was flattened before the layer, as the graph has it; none if there was no map."""
    nodes = {node.name: node for node in calibration.traced.standalone.captured.graph.nodes}
    call = nodes[consumer.node]
    layer = operator_of(call.target).layer
    assert layer is not None
    node: fx.Node = layer.argument(call, "input")
    while len(node.meta["val"].shape) < 3 and node.op == "call_function":
        if operation_name(node.target) not in _SAME_ORDER:
            return ()
        node = node.all_input_nodes[0]
    return tuple(node.meta["val"].shape[2:])
