"""One-pass recovery: every layer that lost inputs is refitted from the statistics of the original network."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from recoup.algebra.ridge import Compensated, compensate, on_new_rows, rescale_variance
from recoup.channels.groups import Consumer
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
    return _solutions(calibration, keep, rescale=False)[0]


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
    original = calibration.parameters[consumer.weight]
    covariance = seen.covariance
    kept = calibration.structure.keep_indices(seen.channel_of.cpu(), keep).to(covariance.device)
    fitted = compensate(
        covariance, seen.as_features(original), kept, ridge=calibration.method.ridge, name=consumer.name
    )
    if rescale:
        fitted = rescale_variance(covariance, fitted)
    weight = seen.as_weight(fitted.weight, original)
    lost = (original.double() - weight).movedim(seen.input_dim, 1).flatten(1)
    shift = lost @ seen.mean  # mean^T (W - Ŵ): every output keeps its mean
    biases = {name: _shifted(calibration.parameters.get(name), shift) for name in consumer.biases}
    written = {name: value.to(original.dtype) for name, value in {consumer.weight: weight, **biases}.items()}
    return written, _recovery(fitted, kept, seen)


def _shifted(bias: Tensor | None, shift: Tensor) -> Tensor:
    return shift if bias is None else bias.double() + shift


def _recovery(fitted: Compensated, kept: Tensor, seen: Statistics) -> Recovery:
    inputs, rows = int(kept.sum()), seen.moments.effective
    residual = on_new_rows(fitted.relative_residual, rows, inputs)
    return Recovery(residual, fitted.ridge, fitted.condition, inputs, int(rows))
