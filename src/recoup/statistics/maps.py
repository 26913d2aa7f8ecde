"""Feature maps that layers read, and the gradients of a loss with respect to them: one pass for all groups.

The pass shows the network a few of the calibration images. Of every layer that reads prunable channels, all that it
reads is kept until all groups are ranked. The number of images follows from that: maps and gradients of all layers
together take at most `MOST_BYTES`.

What a call of a layer reads is kept as (n, k, inputs, *positions): a network may fold k parts of every sample, such as
the frames of a film, into the first dim, and k is 1 where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recoup.channels.structure import named_tensors
from recoup.errors import CalibrationError, UsageError
from recoup.graph.copies import working_copy
from recoup.inputs.batches import Inputs, call_checked, tensors_in
from recoup.operators.names import operation_name
from recoup.operators.record import operator_of
from recoup.statistics.calibrate import Calibration, watched
from recoup.statistics.observe import layer_call

# What maps and gradients of all layers may take, by kind of device: fixed, so that results do not depend on what else
# fills the memory.
MOST_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
# Images that pass the network at a time: derivatives need all its activations at once.
AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class LayerReading:
    """What one call of a layer reads; `has_window` says that its inputs lie before the positions, not behind."""

    value: Tensor
    has_window: bool

    def arranged(self, like: Tensor, samples: int) -> Tensor:
        """A tensor in the shape of the value as (n, k, inputs, *positions)."""
        unfolded = like.reshape(samples, -1, *like.shape[1:])
        return unfolded if self.has_window else unfolded.movedim(-1, 2)


class ReadingProbe(TorchFunctionMode):
    """While active, keeps what every watched layer reads, call by call, by the layer's name.

    With `differentiable`, every layer reads a copy of its own, so that a derivative by it passes that layer alone.
    """

    def __init__(self, names: Mapping[int, str], *, differentiable: bool) -> None:
        """Names of layers by `id` of the weight."""
        super().__init__()
        self._names, self._differentiable = names, differentiable
        self.read: dict[str, list[LayerReading]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take note of what a layer reads, then run it on that copy."""
        kwargs = kwargs or {}
        call = layer_call(func, args, kwargs)
        name = self._names.get(id(call.get("weight")))
        if name is None:
            return func(*args, **kwargs)
        layer = operator_of(func).layer
        assert layer is not None
        copy = call["input"].clone()  # the network may write into its own later
        if self._differentiable and not copy.requires_grad:
            copy.requires_grad_()
        self.read.setdefault(name, []).append(LayerReading(copy, layer.has_window))
        place = layer.arguments.index("input")
        if "input" in kwargs:
            return func(*args, **{**kwargs, "input": copy})
        return func(*args[:place], copy, *args[place + 1 :], **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class SeenPass:
    """What layers read of some samples, call by call, what the network returns, and the labels."""

    read: Mapping[str, list[LayerReading]]
    samples: int
    outputs: Any
    labels: Tensor | None


class SeenMaps:
    """What layers read on a few images, and the gradients of the loss: each measured at the first call."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._maps: dict[str, list[Tensor]] | None = None
        self._gradients: dict[str, list[Tensor]] | None = None

    def maps(self) -> Mapping[str, list[Tensor]]:
        """What each call of a layer reads (n, k, inputs, *positions), by the layer's name."""
        if self._maps is None:
            with torch.no_grad():
                self._maps = _joined([_values(seen) for seen in self._passes(differentiable=False)])
        return self._maps

    def gradients(self) -> Mapping[str, list[Tensor]]:
        """The derivative of every sample's loss by what each layer reads, in the shape of `maps`."""
        if self._gradients is None:
            maps, gradients = [], []
            with torch.enable_grad():
                for seen in self._passes(differentiable=True):
                    gradients.append(_derivatives(_loss(self._calibration, seen.outputs, seen.labels), seen))
                    maps.append(_values(seen))
            self._maps, self._gradients = _joined(maps), _joined(gradients)
        return self._gradients

    def _passes(self, *, differentiable: bool) -> Iterator[SeenPass]:
        """A bounded number of images at a time."""
        twin = working_copy(self._calibration.traced.host).requires_grad_(False)
        tensors = named_tensors(twin)
        names = {id(tensors[c.weight]): c.name for c in watched(self._calibration.structure)}
        for number, inputs in enumerate(_images(self._calibration), start=1):
            probe = ReadingProbe(names, differentiable=differentiable)
            with probe:
                outputs = call_checked(twin, inputs, number)
            _require_samples(probe.read, inputs.size)
            yield SeenPass(probe.read, inputs.size, outputs, inputs.labels)


def _images(calibration: Calibration) -> Iterator[Inputs]:
    """The kept images of one shape, as many of them as the maps have room for."""
    kept = calibration.images or tuple(calibration.split.batches[place] for place in calibration.split.fit)
    if not kept:
        raise UsageError(
            "no calibration images were kept to look at. Calibrate with a method whose selector looks at feature maps, "
            "such as recoup.Paper(selector='taylor')."
        )
    device = calibration.split.device
    room = MOST_BYTES.get(device.type, MOST_BYTES["cpu"]) // max(1, 2 * _bytes_per_image(calibration))
    left, shapes = max(1, room), kept[0].sample_shapes()
    for inputs in (each for each in kept if each.sample_shapes() == shapes):
        count = min(inputs.size, left)
        for places in torch.arange(count).split(AT_ONCE):
            yield inputs.pick(places).to(device)
        left -= count
        if not left:
            return


def _require_samples(read: Mapping[str, list[LayerReading]], samples: int) -> None:
    """What a layer reads has to begin with samples, or with the same number of parts of each."""
    for name, readings in read.items():
        for shape in (tuple(reading.value.shape) for reading in readings):
            if len(shape) < 2 or shape[0] % samples:
                raise _unclear_samples(name, f"{shape} for {samples} images")


def _unclear_samples(name: str, what: str) -> UsageError:
    return UsageError(
        f"{name} reads {what}, so nobody can tell which part of it belongs to which image. Let the images, or the "
        "parts of each, lie along the first dim, or choose a selector that looks at no maps, such as 'backward'."
    )


def _bytes_per_image(calibration: Calibration) -> int:
    """What all watched layers read of one image, as the captured graph has it."""
    nodes = {node.name: node for node in calibration.traced.standalone.captured.graph.nodes}
    total = 0
    for consumer in watched(calibration.structure):
        node = nodes[consumer.node]
        layer = operator_of(node.target).layer
        if layer is None:
            raise UsageError(
                f"{consumer.name} is multiplied by step after step within {operation_name(node.target)}, where there "
                "are no maps to look at. Choose a selector that needs none, such as 'backward', or exclude= the module."
            )
        value = layer.argument(node, "input").meta["val"]
        total += value.numel() * value.element_size()
    return total


def _loss(calibration: Calibration, outputs: Any, labels: Tensor | None) -> Tensor:
    """The losses of all samples, added up: of class scores the cross-entropy, otherwise half the squared norm.

    Classes are the labels that came with the images, or else the network's own answers.
    """
    values = [value for value in tensors_in(outputs) if value.is_floating_point() and value.dim()]
    if not any(value.requires_grad for value in values):
        raise UsageError(
            "what the network returns has no derivative by what its layers read, so there are no gradients to rank by. "
            "Choose a selector that needs none, such as 'backward'."
        )
    if not _are_scores(calibration, values):
        return torch.stack([value.double().square().sum() / 2 for value in values]).sum()
    scores = values[0].double()
    if labels is None or scores.dim() != 2:
        return F.cross_entropy(scores, scores.detach().argmax(dim=1), reduction="sum")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= scores.shape[1]:
        raise CalibrationError(
            f"the labels of the calibration images go from {low} to {high}, but the model has {scores.shape[1]} "
            "outputs. Number the classes as the model does, or leave the labels out."
        )
    return F.cross_entropy(scores, labels.to(scores.device), reduction="sum")


def _are_scores(calibration: Calibration, values: list[Tensor]) -> bool:
    kind = getattr(calibration.method, "outputs", "auto")
    if kind == "classes" or calibration.are_scores:
        return values[0].dim() >= 2 and values[0].shape[1] > 1
    return kind == "auto" and len(values) == 1 and values[0].dim() == 2 and values[0].shape[1] > 1


def _derivatives(loss: Tensor, seen: SeenPass) -> dict[str, list[Tensor]]:
    every = [reading.value for readings in seen.read.values() for reading in readings]
    found = iter(torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True))
    return {name: [r.arranged(next(found), seen.samples) for r in readings] for name, readings in seen.read.items()}


def _values(seen: SeenPass) -> dict[str, list[Tensor]]:
    return {
        name: [r.arranged(r.value.detach(), seen.samples) for r in readings] for name, readings in seen.read.items()
    }


def _joined(parts: list[dict[str, list[Tensor]]]) -> dict[str, list[Tensor]]:
    """The samples of all passes, one behind the other."""
    joined = {}
    for name in parts[0]:
        shapes = {tuple(call.shape[1:] for call in part.get(name, ())) for part in parts}
        if len(shapes) > 1:
            raise _unclear_samples(name, "another shape for another number of images")
        joined[name] = [torch.cat(calls) for calls in zip(*(part[name] for part in parts), strict=True)]
    return joined
