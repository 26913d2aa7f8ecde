"""One-pass recovery: every layer that lost inputs is refitted from the statistics of the original network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from recoup.algebra.moments import Moments
from recoup.algebra.ridge import Compensated, compensate, energy, moved, on_new_rows, rescale_variance
from recoup.channels.settling import settled
from recoup.channels.structure import Consumer
from recoup.plan import Plan, Recovery
from recoup.recovery.plans import assemble
from recoup.statistics.calibrate import Calibration, Statistics


def recover_in_one_pass(calibration: Calibration, keep: Tensor, *, rescale: bool = False) -> Plan:
    """The plan that keeps `keep`, a mask over all channels.

    With `rescale`, every refitted output is scaled back to the variance it had.
    """
    weights, recovery = _solutions(calibration, keep, rescale)
    return assemble(calibration, keep, weights, recovery)


def one_pass_weights(calibration: Calibration, keep: Tensor) -> dict[str, Tensor]:
    """The refitted tensors alone, at their original size."""
    weights = _solutions(calibration, keep, rescale=False)[0]
    return settled(calibration.structure, calibration.parameters, weights, keep)


def _solutions(calibration: Calibration, keep: Tensor, rescale: bool) -> tuple[dict[str, Tensor], dict[str, Recovery]]:
    structure = calibration.structure
    weights: dict[str, Tensor] = {}
    recovery: dict[str, Recovery] = {}
    for consumer in structure.consumers:
        kept = structure.keep_indices(consumer.inputs, keep)
        if not bool(kept.all()):
            make = partial(_refit, calibration, consumer, keep, rescale)
            key = ("layer", consumer.name, rescale)
            solved, recovery[consumer.name] = calibration.cache(key, kept.numpy().tobytes(), make)
            weights.update(solved)
    return weights, recovery


def _refit(
    calibration: Calibration, consumer: Consumer, keep: Tensor, rescale: bool
) -> tuple[dict[str, Tensor], Recovery]:
    seen = calibration.statistics[consumer.name]
    original = calibration.weight(consumer)
    kept = calibration.structure.keep_indices(seen.channel_of.cpu(), keep).to(seen.moments.mean.device)
    parts = enumerate(_parts(seen, original))
    fits = [_fit(calibration, consumer, number, part, kept, rescale) for number, part in parts]
    weight, shift = original.double(), original.new_zeros(original.shape[1 - seen.input_dim], dtype=torch.float64)
    for fit in fits:
        weight = weight.index_copy(1 - seen.input_dim, fit.outputs, fit.weight)
        shift[fit.outputs] = fit.shift
    biases = {name: _shifted(calibration.parameters.get(name), shift) for name in consumer.biases}
    solved = {consumer.weight: consumer.gathered(weight), **biases}
    return {name: value.to(original.dtype) for name, value in solved.items()}, _recovery(fits, kept, consumer.parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """Outputs (n,) of a layer with what was seen of its inputs under the weights that are theirs."""

    outputs: Tensor
    moments: Moments
    mean: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """What is written for some outputs: weights in the layer's form, a shift of the bias, and how good they are."""

    outputs: Tensor
    weight: Tensor
    shift: Tensor
    found: Compensated
    rows: float


def _parts(seen: Statistics, weight: Tensor) -> list[_Share]:
    """All outputs together, or every pattern by itself."""
    if seen.patterns:
        return [_Share(pattern.outputs, pattern.moments, pattern.mean) for pattern in seen.patterns]
    every = torch.arange(weight.shape[1 - seen.input_dim], device=weight.device)
    return [_Share(every, seen.moments, seen.mean)]


def _fit(calibration: Calibration, consumer: Consumer, number: int, part: _Share, kept: Tensor, rescale: bool) -> _Fit:
    seen = calibration.statistics[consumer.name]
    original = seen.of_outputs(calibration.weight(consumer), part.outputs)
    covariance, features = seen.minimised(part.moments), seen.as_features(original)
    variance = calibration.cache(("variance", consumer.name, number), (), partial(energy, covariance, features))
    ridge = calibration.method.ridge
    fitted = compensate(covariance, features, kept, ridge=ridge, name=consumer.name, variance=variance)
    if rescale:
        fitted = rescale_variance(covariance, fitted)
    weight = seen.as_weight(fitted.weight, original)
    old, new = (tensor.double().movedim(seen.input_dim, 1).flatten(1) for tensor in (original, weight))
    # mean^T (W - Ŵ): every output keeps its mean
    shift, terms = (old - new) @ part.mean, (old.abs() + new.abs()) @ part.mean.abs()
    shift = moved(torch.zeros_like(shift), shift, terms, original.dtype)
    return _Fit(part.outputs, weight, shift, fitted, part.moments.effective)


def _shifted(bias: Tensor | None, shift: Tensor) -> Tensor:
    return shift if bias is None else bias.double() + shift


def _recovery(fits: Sequence[_Fit], kept: Tensor, parts: int) -> Recovery:
    """How well the layer was refitted: the error of all its outputs, and the least that any of them was fitted to."""
    inputs, rows = int(kept.sum()) // parts, min(fit.rows for fit in fits)
    total = sum(float(fit.found.variance.sum()) for fit in fits)
    left = sum(float(fit.found.residual.sum()) for fit in fits)
    residual = on_new_rows(left / total if total > 0 else 0.0, rows, inputs)
    ridge, condition = (max(getattr(fit.found, name) for fit in fits) for name in ("ridge", "condition"))
    return Recovery(residual, ridge, condition, inputs, int(rows))
