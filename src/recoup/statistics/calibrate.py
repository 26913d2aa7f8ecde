"""Calibration: one pass over the data, from which every later stage lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup.algebra.moments import Moments, apart, sensitivity, squared_slopes
from recoup.algebra.patches import Window, paired_rows
from recoup.algebra.selection import looks_at_images
from recoup.algebra.shrinkage import choose_strength, shrink
from recoup.channels.structure import Consumer, Structure, named_tensors
from recoup.config import Method, require_flag, require_method, require_progress
from recoup.errors import CalibrationError, require_kind, warn
from recoup.graph.copies import working_copy
from recoup.inputs.batches import (
    Inputs,
    call_checked,
    check_finite,
    device_of,
    numbered_inputs,
    require_alike,
    tensors_in,
)
from recoup.inputs.padding import counted, flags_for, has_padding
from recoup.inputs.split import Split
from recoup.inputs.surroundings import undisturbed
from recoup.progress import Progress, silent
from recoup.statistics.cache import Cache
from recoup.statistics.different import DifferentSamples
from recoup.statistics.kept_images import KeptImages
from recoup.statistics.observe import Observer
from recoup.statistics.sums import Pattern, PatternSums, RowSums
from recoup.tracing.trace import Traced

# Past this many inputs a layer gets one covariance of its channels, shared by the positions of a flattened map or the
# taps of a kernel: 8192² float64 are 512 MiB, and no calibration set determines more regressors than that.
MOST_INPUTS = 8192
# The same for kernels of so many taps: what neighbouring taps read hardly differs, so fewer regressors are determined.
LONG_KERNEL, MOST_INPUTS_OF_LONG = 32, 2048
# A layer that reads a flattened map gets a prior where fewer rows were seen than so many times its inputs.
ENOUGH_ROWS = 2
# So many samples that differ are counted, and are enough to call a channel constant: one that did not vary on n samples
# varies, with 95 % confidence, on less than 3 / n of all.
ENOUGH_SAMPLES = 100


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What was seen at the input of one consumer.

    `moments` are over m features: the d inputs of a patch, or, for a long flattened map or kernel, its channels, each
    standing for `share` inputs (d = m · share). `mean` (d,) is that of every input. `input_dim` is the weight's dim
    that the inputs lie along. A layer that is not `centred` has no bias that could make up for a mean. With a weight
    for each output, `patterns` has the moments of every set of outputs that share theirs; otherwise it is empty.
    Of a grouped convolution, only inputs of one of its `parts` have to do with each other.
    """

    moments: Moments
    mean: Tensor
    share: int
    channel_of: Tensor
    input_dim: int = 1
    centred: bool = True
    parts: int = 1
    patterns: tuple[Pattern, ...] = ()

    @property
    def covariance(self) -> Tensor:
        """What the fit minimises over (m, m): the covariance, or without a bias the second moments."""
        return self.minimised(self.moments)

    def minimised(self, moments: Moments) -> Tensor:
        """The same of other moments of this layer's inputs."""
        found = moments.covariance
        if not self.centred:
            found = found + torch.outer(moments.mean, moments.mean)
        return found if self.parts == 1 else apart(found, len(found) // self.parts)

    def of_outputs(self, weight: Tensor, outputs: Tensor) -> Tensor:
        """What a weight has for some of the outputs."""
        return weight.index_select(1 - self.input_dim, outputs)

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
    """A traced model, the split it was calibrated on and the method; statistics of layers, and original parameters.

    `samples` were given in all; so many of those that were fitted to are `different`, up to `ENOUGH_SAMPLES`. The
    outputs may be known to be class scores (`are_scores`). `images` are a few of those that were fitted to, kept where
    the selector may look at feature maps. `cache` remembers what later stages compute from these values.
    """

    traced: Traced
    split: Split
    method: Method
    statistics: Mapping[str, Statistics]
    parameters: Mapping[str, Tensor]
    samples: int
    are_scores: bool = False
    different: int = ENOUGH_SAMPLES
    images: tuple[Inputs, ...] = ()
    cache: Cache = field(default_factory=Cache, init=False, repr=False)

    @property
    def structure(self) -> Structure:
        """The traced structure."""
        return self.traced.structure

    def weight(self, consumer: Consumer) -> Tensor:
        """The original weight of a layer, as that of a dense one."""
        return consumer.spread(self.parameters[consumer.weight])

    @property
    def model(self) -> nn.Module:
        """The caller's model."""
        return self.traced.standalone.model


@undisturbed
def calibrate(
    traced: Traced, split: Split, method: Method, progress: Progress = silent, *, are_scores: bool = False
) -> Calibration:
    """Statistics of every layer that reads prunable channels, from one pass over the images that are fitted to.

    `are_scores` says that the outputs are class scores; otherwise the weights that make them tell.

    Memory: one float64 matrix of (inputs · kernel)² per such layer, plus a bounded number of patches at a time; with
    weighting="outputs" up to `PATTERNS` more of them (`statistics/sums.py`).

    Raises:
        CalibrationError: there is no batch, the model fails on one, or a value is not finite.
    """
    require_kind("traced", traced, Traced, "what recoup.trace returns")
    require_kind("split", split, Split, "what recoup.split returns")
    require_method(method)
    require_progress(progress)
    require_flag("are_scores", are_scores)
    twin = working_copy(traced.host)
    tensors = named_tensors(twin)
    recorders = {c.name: _Recorder(c, traced, tensors, method) for c in watched(traced.structure)}
    observer = Observer({id(tensors[r.consumer.weight]): r.see for r in recorders.values()})
    different = DifferentSamples(ENOUGH_SAMPLES)
    kept = KeptImages(length_of_fit(split)) if looks_at_images(method.selector) else None
    samples = _run(twin, split, observer, different, kept, progress, list(recorders.values()))
    _warn_of_padding(list(recorders.values()))
    statistics = {name: recorder.statistics() for name, recorder in recorders.items()}
    statistics |= _with_priors(twin, split, statistics, list(recorders.values()), method)
    parameters = {name: tensor.detach() for name, tensor in tensors.items()}
    given = split.size or samples
    images = () if kept is None else kept.images
    return Calibration(traced, split, method, statistics, parameters, given, are_scores, different.count, images)


def _with_priors(
    twin: nn.Module,
    split: Split,
    statistics: Mapping[str, Statistics],
    recorders: Sequence[_Recorder],
    method: Method,
) -> dict[str, Statistics]:
    """Statistics of layers that read a flattened map of which too few images were seen, shrunk as held-out ones say."""
    seen_enough = {r.name: statistics[r.name].moments.effective >= ENOUGH_ROWS * r.inputs for r in recorders}
    few = [r for r in recorders if r.positions_read > 1 and not seen_enough[r.name]]
    if not few or not split.held:
        return {}
    poor = [recorder.again() for recorder in few]
    tensors = named_tensors(twin)
    observer = Observer({id(tensors[recorder.consumer.weight]): recorder.see for recorder in poor})
    with torch.no_grad(), observer:
        for place in split.held:
            for recorder in poor:
                recorder.counted = counted(split.batches[place])
            call_checked(twin, split.batches[place].to(split.device), split.numbers[place])
    found = {}
    for recorder in poor:
        seen, held, count = statistics[recorder.name], recorder.statistics().moments, recorder.positions_read
        weight = seen.as_features(recorder.consumer.spread(tensors[recorder.consumer.weight]))
        strength = choose_strength(seen.moments, held, weight, count, method.ridge)
        found[recorder.name] = replace(seen, moments=shrink(seen.moments, count, strength))
    return found


def _warn_of_padding(recorders: Sequence[_Recorder]) -> None:
    names = [recorder.name for recorder in recorders if recorder.counts_padding]
    if names:
        warn(
            f"padding counts in the statistics of {len(names)} layers ({', '.join(names[:3])}), as the shapes of what "
            "they read do not show which dim the attention mask is for. Calibrate on batches without padding."
        )


def watched(structure: Structure) -> list[Consumer]:
    """Consumers that read a group which can lose channels."""
    names = {name for group in structure.prunable for name in group.consumers}
    return [consumer for consumer in structure.consumers if consumer.name in names]


def length_of_fit(split: Split) -> int | None:
    """The number of batches that are fitted to, where it is known."""
    return split.stream.length if split.stream is not None else len(split.fit)


def _run(
    model: nn.Module,
    split: Split,
    observer: Observer,
    different: DifferentSamples,
    kept: KeptImages | None,
    progress: Progress,
    recorders: Sequence[_Recorder],
) -> int:
    """Show the model every batch that is fitted to; how many samples there were."""
    device, samples, length = device_of(model), 0, length_of_fit(split)
    for done, (number, batch) in enumerate(split.fitting(), start=1):
        given = numbered_inputs(batch, model, number)
        require_alike(split.first, given, number)
        inputs = given.to(device)
        check_finite(inputs, number)
        different.see(inputs)
        if kept is not None:
            kept.see(inputs)
        for recorder in recorders:
            recorder.counted = counted(inputs)
        with torch.no_grad(), observer:
            outputs = call_checked(model, inputs, number)
        _check_outputs(model, outputs, number)
        samples += inputs.size
        progress("calibrate", done, length)
    return samples


def _check_outputs(model: nn.Module, outputs: Any, number: object) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors_in(outputs)):
        raise CalibrationError(
            f"{type(model).__name__} returns NaN or infinite values for calibration batch {number}. Check its weights "
            "and how the inputs are normalised."
        )


class _Recorder:
    """Turns what a consumer reads into rows and sums them."""

    def __init__(self, consumer: Consumer, traced: Traced, tensors: Mapping[str, Tensor], method: Method) -> None:
        self.consumer = consumer
        weight = consumer.spread(tensors[consumer.weight])
        self._channel_of, self._share = _features(consumer)
        make = partial(RowSums, len(self._channel_of), self._share, weight.device)
        inputs = weight.select(1 - consumer.input_dim, 0).numel()
        chain = traced.activations[consumer.name] if method.weighting != "none" else None
        self._activation = chain.bind(tensors) if chain is not None else None
        by_output = self._activation is not None and method.weighting == "outputs"
        self._sums = PatternSums(make, method.seed) if by_output else make()
        self._positions = method.positions
        self._generator = torch.Generator().manual_seed(method.seed)
        self.inputs, self.name = inputs, consumer.name
        runs = flattened_channels(consumer)
        is_whole = runs is not None and self._share == 1 and consumer.kernel == 1
        self.positions_read = len(consumer.inputs) // len(runs) if is_whole and runs is not None else 1
        self._arguments = consumer, traced, tensors, method
        # The positions of the batch at hand that count, and whether some that do not could not be told by shapes.
        self.counted: Tensor | None = None
        self.counts_padding = False

    def again(self) -> _Recorder:
        """A recorder of the same layer that has seen nothing."""
        return _Recorder(*self._arguments)

    def see(self, inputs: Tensor, outputs: Tensor, window: Window | None, /) -> None:
        flags = flags_for(inputs.shape, self.counted)
        self.counts_padding |= flags is None and has_padding(self.counted)
        for rows, made in paired_rows(inputs, outputs, window, self._positions, self._generator, flags):
            self._add(rows, made)

    def _add(self, rows: Tensor, outputs: Tensor) -> None:
        if not bool(rows.isfinite().all()):
            raise CalibrationError(
                f"the input of {self.consumer.name} is NaN or infinite. The network overflows on this data: check its "
                "normalisation and precision."
            )
        if isinstance(self._sums, PatternSums):
            assert self._activation is not None
            self._sums.update(rows, squared_slopes(outputs, self._activation))
            return
        self._sums.update(rows, None if self._activation is None else sensitivity(outputs, self._activation))

    def statistics(self) -> Statistics:
        summed = self._summed()
        if summed is None:
            raise CalibrationError(
                f"{self.consumer.name} was captured for one sample but never ran during calibration. The model's code "
                "takes another way for several samples, or replaces the weight at run time; make it compute the same "
                "for any number of samples."
            )
        moments, mean, patterns = summed
        channel_of = self._channel_of.to(mean.device)
        centred = bool(self.consumer.biases)
        consumer = self.consumer
        return Statistics(moments, mean, self._share, channel_of, consumer.input_dim, centred, consumer.parts, patterns)

    def _summed(self) -> tuple[Moments, Tensor, tuple[Pattern, ...]] | None:
        if isinstance(self._sums, PatternSums):
            return None if self._sums.is_empty else self._sums.result()
        moments = self._sums.moments()
        return (moments, self._sums.mean(moments), ()) if moments.rows else None


def most_inputs(kernel: int) -> int:
    """With how many inputs a layer whose kernel has so many taps is still fitted input by input."""
    return MOST_INPUTS_OF_LONG if kernel >= LONG_KERNEL else MOST_INPUTS


def _features(consumer: Consumer) -> tuple[Tensor, int]:
    """The channel of each feature, and how many inputs a feature stands for."""
    runs = flattened_channels(consumer)
    if len(consumer.inputs) * consumer.kernel > most_inputs(consumer.kernel):
        if consumer.kernel > 1:
            return consumer.inputs, consumer.kernel
        if runs is not None:
            return runs, len(consumer.inputs) // len(runs)
    return consumer.inputs.repeat_interleave(consumer.kernel), 1


def flattened_channels(consumer: Consumer) -> Tensor | None:
    """The channels of a flattened map that a layer reads, each at the same number of places; None for anything else."""
    inputs = consumer.inputs
    runs = torch.unique_consecutive(inputs)
    share = len(inputs) // len(runs)
    is_regular = bool((inputs >= 0).all()) and torch.equal(runs.repeat_interleave(share), inputs)
    return runs if is_regular and share > 1 else None
