"""Calibration: one pass over the data, from which every later stage lives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recoup.algebra.linalg import live_rows
from recoup.algebra.moments import Accumulator, Moments, sensitivity
from recoup.algebra.patches import Window, paired_rows
from recoup.batches import Stream, call_checked, check_finite, device_of, inputs_of, tensors_in
from recoup.errors import CalibrationError
from recoup.observe import Observer
from recoup.progress import Progress, silent
from recoup.settings import Settings
from recoup.structure.copying import working_copy
from recoup.structure.groups import Consumer, Group, Structure, named_tensors
from recoup.structure.trace import Traced

# Past this many inputs, a layer that reads a flattened map gets one covariance per channel, shared by all positions:
# 8192² float64 are 512 MiB, and no calibration set determines more regressors than that.
MOST_INPUTS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What was seen at the input of one consumer.

    `moments` are over m features: the d inputs of a patch, or, for a long flattened map, its channels, each standing
    for `share` inputs (d = m · share). `mean` (d,) is that of every input. `input_dim` is the dim of the weight that
    the inputs lie along. A layer that is not `centred` has no bias that could make up for a mean.
    """

    moments: Moments
    mean: Tensor
    share: int
    channel_of: Tensor
    input_dim: int = 1
    centred: bool = True

    @property
    def covariance(self) -> Tensor:
        """What the fit minimises over (m, m): the covariance, or without a bias the second moments."""
        if self.centred:
            return self.moments.covariance
        return self.moments.covariance + torch.outer(self.moments.mean, self.moments.mean)

    def as_features(self, weight: Tensor) -> Tensor:
        """A weight (N, C, ...), or (C, N, ...), as float64 (m, share · N)."""
        rows = weight.detach().double().movedim(self.input_dim, 1).flatten(1).T
        return rows.reshape(len(self.channel_of), -1)

    def as_weight(self, features: Tensor, like: Tensor) -> Tensor:
        """The inverse of `as_features`, in the shape of `like`."""
        turned = like.movedim(self.input_dim, 1)
        return features.reshape(-1, turned.shape[0]).T.reshape(turned.shape).movedim(1, self.input_dim)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A traced model, the statistics of the layers that read prunable channels, and its original parameters."""

    traced: Traced
    statistics: Mapping[str, Statistics]
    parameters: Mapping[str, Tensor]
    samples: int
    settings: Settings

    @property
    def structure(self) -> Structure:
        """The traced structure."""
        return self.traced.structure


def calibrate(
    model: nn.Module,
    traced: Traced,
    batches: Iterable[Any],
    settings: Settings | None = None,
    progress: Progress = silent,
    *,
    numbers: Iterable[object] | None = None,
) -> Calibration:
    """Statistics of every layer that reads prunable channels, from one pass over `batches`.

    `numbers` are what messages call the batches by, 1, 2, 3 ... if not given.

    Memory: one float64 matrix of (inputs · kernel)² per such layer, plus a bounded number of patches at a time.

    Raises:
        CalibrationError: there is no batch, the model fails on one, or a value is not finite.
    """
    settings = settings or Settings()
    twin = working_copy(traced.host(model))
    tensors = named_tensors(twin)
    recorders = {c.name: _Recorder(c, traced, tensors, settings) for c in watched(traced.structure)}
    observer = Observer({id(tensors[r.consumer.weight]): r.see for r in recorders.values()})
    samples = _run(twin, batches, observer, progress, itertools.count(1) if numbers is None else numbers)
    statistics = {name: recorder.statistics() for name, recorder in recorders.items()}
    parameters = {name: tensor.detach() for name, tensor in tensors.items()}
    return Calibration(traced, statistics, parameters, samples, settings)


def watched(structure: Structure) -> list[Consumer]:
    """Consumers that read a group which can lose channels."""
    names = {name for group in structure.prunable for name in group.consumers}
    return [consumer for consumer in structure.consumers if consumer.name in names]


def dead_channels(calibration: Calibration) -> Tensor:
    """Free channels that were constant wherever they are read (bool mask over all channels); no layer is left empty."""
    structure = calibration.structure
    alive = torch.ones(structure.width, dtype=torch.bool)
    for group in structure.prunable:
        alive[group.channels] = _alive(calibration, group) | group.locked
        alive = structure.refill(alive, torch.arange(group.start, group.start + group.width))
    return ~alive


def _alive(calibration: Calibration, group: Group) -> Tensor:
    alive = torch.zeros(group.width, dtype=torch.bool)
    for name in group.consumers:
        seen = calibration.statistics[name]
        live = live_rows(seen.covariance).cpu()
        channels = seen.channel_of.cpu()[live] - group.start
        alive[channels[(channels >= 0) & (channels < group.width)]] = True
    return alive


def _run(
    model: nn.Module, batches: Iterable[Any], observer: Observer, progress: Progress, numbers: Iterable[object]
) -> int:
    stream = batches if isinstance(batches, Stream) else Stream(batches)
    device = device_of(model)
    samples = 0
    for done, (number, batch) in enumerate(zip(numbers, stream, strict=False), start=1):
        inputs = inputs_of(batch, model).to(device)
        check_finite(inputs, number)
        with torch.no_grad(), observer:
            outputs = call_checked(model, inputs, number)
        _check_outputs(model, outputs, number)
        samples += inputs.size
        progress("calibrate", done, stream.length)
    return samples


def _check_outputs(model: nn.Module, outputs: Any, number: object) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors_in(outputs)):
        raise CalibrationError(
            f"{type(model).__name__} returns NaN or infinite values for calibration batch {number}. Check its weights "
            "and how the inputs are normalised."
        )


class _Recorder:
    """Turns what a consumer reads into rows and sums them."""

    def __init__(self, consumer: Consumer, traced: Traced, tensors: Mapping[str, Tensor], settings: Settings) -> None:
        self.consumer = consumer
        weight = tensors[consumer.weight]
        self._channel_of, self._share = _features(consumer)
        self._sums = Accumulator(len(self._channel_of), weight.device)
        inputs = weight.select(1 - consumer.input_dim, 0).numel()
        self._mean = torch.zeros(inputs, dtype=torch.float64, device=weight.device)
        self._total = torch.zeros((), dtype=torch.float64, device=weight.device)
        chain = traced.following[consumer.name] if settings.weighting == "slope" else None
        self._following = chain.bind(tensors) if chain is not None else None
        self._positions = settings.positions
        self._generator = torch.Generator().manual_seed(settings.seed)

    def see(self, inputs: Tensor, outputs: Tensor, window: Window | None, /) -> None:
        for rows, made in paired_rows(inputs, outputs, window, self._positions, self._generator):
            self._add(rows, made)

    def _add(self, rows: Tensor, outputs: Tensor) -> None:
        if not bool(rows.isfinite().all()):
            raise CalibrationError(
                f"the input of {self.consumer.name} is NaN or infinite. The network overflows on this data: check its "
                "normalisation and precision."
            )
        weights = sensitivity(outputs, self._following) if self._following is not None else None
        if self._share == 1:
            self._sums.update(rows, weights)
            return
        self._add_shared(rows, weights)

    def _add_shared(self, rows: Tensor, weights: Tensor | None) -> None:
        """Positions of a flattened map as rows of its channels; the mean of every single input is kept besides."""
        weights = torch.ones(len(rows), device=rows.device) if weights is None else weights
        self._mean += weights.double() @ rows.double()
        self._total += weights.double().sum()
        by_position = rows.unflatten(1, (-1, self._share)).transpose(1, 2).flatten(0, 1)
        self._sums.update(by_position, weights.repeat_interleave(self._share))

    def statistics(self) -> Statistics:
        moments = self._sums.moments()
        if not moments.rows:
            raise CalibrationError(
                f"{self.consumer.name} was captured but never ran during calibration. Its weight is probably replaced "
                "at run time; call the model the way it was captured."
            )
        mean = moments.mean if self._share == 1 else self._mean / self._total.clamp(min=1e-300)
        channel_of = self._channel_of.to(mean.device)
        centred = bool(self.consumer.biases)
        return Statistics(moments, mean, self._share, channel_of, self.consumer.input_dim, centred)


def _features(consumer: Consumer) -> tuple[Tensor, int]:
    """The channel of each feature, and how many inputs a feature stands for."""
    inputs = consumer.inputs
    runs = torch.unique_consecutive(inputs)
    share = len(inputs) // len(runs)
    regular = bool((inputs >= 0).all()) and torch.equal(runs.repeat_interleave(share), inputs)
    if len(inputs) * consumer.kernel > MOST_INPUTS and regular and share > 1:
        return runs, share
    return inputs.repeat_interleave(consumer.kernel), 1
