"""Mean shift: weights are cut, and biases take over the mean of what went.

    ŷ = W_S^T a_S + b + W_P^T mean(a_P)

So every output keeps its mean, and loses the variance that pruned inputs gave it. A layer that has no place for a bias
is only cut.
"""

from __future__ import annotations

from torch import Tensor

from recoup.channels.structure import Consumer
from recoup.plan import Plan
from recoup.recovery.cutting import cut_weights
from recoup.recovery.plans import assemble
from recoup.statistics.calibrate import Calibration


def recover_means(calibration: Calibration, keep: Tensor) -> Plan:
    """The plan that keeps `keep`, a mask over all channels, and shifts biases by the mean of what is pruned."""
    weights = cut_weights(calibration, keep)
    shifted = [_shifted_biases(calibration, c, weights[c.weight]) for c in _that_lose(calibration, weights)]
    return assemble(calibration, keep, {**weights, **{n: b for biases in shifted for n, b in biases.items()}}, {})


def _that_lose(calibration: Calibration, weights: dict[str, Tensor]) -> list[Consumer]:
    return [consumer for consumer in calibration.structure.consumers if consumer.weight in weights]


def _shifted_biases(calibration: Calibration, consumer: Consumer, cut: Tensor) -> dict[str, Tensor]:
    seen, original = calibration.statistics[consumer.name], calibration.parameters[consumer.weight]
    lost = consumer.spread(original.double() - cut.double()).movedim(seen.input_dim, 1).flatten(1)
    shift = lost @ seen.mean
    for pattern in seen.patterns:  # outputs with a mean of their own
        shift[pattern.outputs] = lost[pattern.outputs] @ pattern.mean
    before = {name: calibration.parameters.get(name) for name in consumer.biases}
    return {
        name: (shift if bias is None else bias.double() + shift).to(original.dtype) for name, bias in before.items()
    }
