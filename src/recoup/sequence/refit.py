"""Sequential recovery: layer by layer, on what the pruned network really reads, towards what the original put out.

Statistics of the original network (the one-pass solution) do not know that a layer's inputs have drifted once layers
before it are pruned. Here every layer is refitted on the inputs it gets, drifted or cut, and a layer that ends in an
addition also makes up for the error of what it is added to. The ridge pulls towards the one-pass weights, and held-out
images say how strongly, layer by layer: at worst the weights stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from recoup.algebra.moments import Accumulator, sensitivity
from recoup.algebra.patches import paired_rows
from recoup.algebra.regression import Fitted, Joint, shrunk
from recoup.calibrate import MOST_INPUTS, Calibration
from recoup.judging.sample import Sample
from recoup.plan import Plan, Recovery
from recoup.progress import Progress, silent
from recoup.recover import assemble
from recoup.sequence.joint import JointRefits
from recoup.sequence.lockstep import Lockstep, Reading
from recoup.structure.route import Stop, route


def recover_in_sequence(
    calibration: Calibration,
    sample: Sample,
    keep: Tensor,
    start: Plan,
    progress: Progress = silent,
) -> Plan:
    """The plan `start`, with the layers it touches and all that come after them refitted one after the other."""
    host = calibration.traced.standalone.host
    path = route(host.graph, calibration.structure)
    written = {name: value.to(sample.device) for name, value in start.weights.items()}
    joints = JointRefits(calibration, sample, keep, path, written)
    recovery = dict(start.recovery)
    walk = Lockstep(host, path, sample.batches, written, sample.device, stretches=tuple(joints.stretches.values()))
    try:
        for number, stop in enumerate(path.stops, start=1):
            if walk.drifts(stop) or stop.consumer.weight in written:
                layer = _Layer(calibration, stop, keep, written)
                if layer.inputs <= MOST_INPUTS:
                    tensors, recovery[stop.consumer.name] = layer.refit(walk, sample)
                    written |= tensors
                    walk.write(tensors)
            written |= joints.refit(walk, stop, written)
            progress("recover", number, len(path.stops))
    finally:
        walk.close()
    return assemble(calibration, keep, written, recovery)


class _Layer:
    """One layer to be refitted: what it keeps, and the weights it starts from."""

    def __init__(self, calibration: Calibration, stop: Stop, keep: Tensor, written: Mapping[str, Tensor]) -> None:
        structure, self._stop, self.consumer = calibration.structure, stop, stop.consumer
        self._original = calibration.parameters[self.consumer.weight]
        device = self._original.device
        self._kept = structure.keep_indices(self.consumer.inputs, keep).nonzero().squeeze(1).to(device)
        self._made = structure.keep_indices(self.consumer.outputs, keep).nonzero().squeeze(1).to(device)
        self._prior = written.get(self.consumer.weight, self._original)
        self._biases = {name: written.get(name, calibration.parameters.get(name)) for name in self.consumer.biases}
        self.inputs = len(self._kept) * self.consumer.kernel
        self._settings = calibration.settings
        chain = calibration.traced.following[self.consumer.name] if self._settings.weighting == "slope" else None
        self._following = chain.bind(calibration.parameters) if chain is not None else None

    def refit(self, walk: Lockstep, sample: Sample) -> tuple[dict[str, Tensor], Recovery]:
        """The layer's new weight and bias, and how well they recover its output on held-out images."""
        seen, held = (self._joint(walk, places) for places in (sample.seen, sample.held))
        prior = self._features(self._prior)
        ridges = self._settings.ridges
        candidates = shrunk(seen, prior, ridges, self.consumer.name)
        errors = torch.stack([held.error(fitted).sum() for fitted in candidates])
        best = candidates[int(errors.argmin())]
        residual = float(errors.min() / held.variance().sum().clamp(min=1e-300))
        recovery = Recovery(residual, best.amount, best.condition, self.inputs, seen.moments.rows)
        return self._tensors(best), recovery

    def _joint(self, walk: Lockstep, places: Sequence[int]) -> Joint:
        sums = Accumulator(self.inputs + len(self._made), self._original.device)
        generator = torch.Generator().manual_seed(self._settings.seed)
        for reading in walk.visit(self._stop, places):
            for rows, weights in self._rows(reading, generator):
                sums.update(rows, weights)
        return Joint(sums.moments(), self.inputs, bool(self.consumer.biases))

    def _rows(self, reading: Reading, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Kept inputs and kept targets, side by side, with the weight of each row."""
        dim = 1 if reading.window is not None else -1
        inputs = reading.inputs.index_select(dim, self._kept)
        made = torch.cat([reading.target.index_select(dim, self._made), reading.outputs], dim=dim)
        for rows, both in paired_rows(inputs, made, reading.window, self._settings.positions, generator):
            targets, outputs = both[:, : len(self._made)], both[:, len(self._made) :]
            weights = sensitivity(outputs, self._following) if self._following is not None else None
            yield torch.cat([rows, targets], dim=1), weights

    def _features(self, weight: Tensor) -> Tensor:
        """The kept part of a weight as float64 (d, N)."""
        turned = weight.detach().double().movedim(self.consumer.input_dim, 1)
        return turned[self._made][:, self._kept].flatten(1).T

    def _tensors(self, fitted: Fitted) -> dict[str, Tensor]:
        """Weight and biases at full size: zero where an input is pruned, as before where an output is."""
        weight = self._prior.detach().clone()
        turned = weight.movedim(self.consumer.input_dim, 1)
        rows = fitted.weight.T.reshape(len(self._made), len(self._kept), *turned.shape[2:]).to(weight.dtype)
        turned[self._made[:, None], self._kept[None, :]] = rows
        written = {self.consumer.weight: weight}
        for name, before in self._biases.items():
            bias = torch.zeros(turned.shape[0], dtype=weight.dtype, device=weight.device) if before is None else before
            bias = bias.detach().clone()
            bias[self._made] = fitted.bias.to(bias.dtype)
            written[name] = bias
        return written
