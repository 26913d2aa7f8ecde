"""Sequential recovery: layer by layer, on what the pruned network really reads, towards what the original put out.

Statistics of the original network (the one-pass solution) do not know that a layer's inputs have drifted once layers
before it are pruned. Here every layer is refitted on the inputs it gets, drifted or cut, and a layer that ends in an
addition also makes up for the error of what it is added to. The ridge pulls towards the one-pass weights, and held-out
images say how strongly, layer by layer: at worst the weights stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from recoup.algebra.few_rows import Collector
from recoup.algebra.moments import sensitivity
from recoup.algebra.patches import paired_rows
from recoup.algebra.ridge import Fitted, Pairs, moved
from recoup.channels.settling import settled
from recoup.inputs.padding import counted, flags_for
from recoup.inputs.split import Split
from recoup.plan import Plan, Recovery
from recoup.progress import Progress, silent
from recoup.recovery.failures import surviving
from recoup.recovery.joint import JointRefits
from recoup.recovery.methods import sequential_method
from recoup.recovery.plans import assemble
from recoup.recovery.schedule import RefitPoint, make_schedule, mask_upto
from recoup.recovery.twin_run import RefitBatch, TwinRun
from recoup.statistics.calibrate import Calibration, most_inputs

# For how many masks the solutions of a layer are remembered: a second round goes through the layers from the last one
# to the first, and comes back to those of one mask.
MASKS = 2


def recover_in_sequence(
    calibration: Calibration,
    split: Split,
    keep: Tensor,
    start: Plan,
    progress: Progress = silent,
    *,
    joint_steps: int = 0,
) -> Plan:
    """The plan `start`, with the layers it touches and all that come after them refitted one after the other.

    Segments are refitted jointly with up to `joint_steps` Gauss-Newton steps each. Without these, the solution of a
    layer is remembered, and serves every other mask that says the same up to there: `start` has to be what one pass
    makes of the mask, and `split` the calibration's own or a part of it.
    """
    host = calibration.traced.standalone.host
    schedule = make_schedule(host.graph, calibration.structure)
    written = {name: value.to(split.device) for name, value in start.weights.items()}
    joints = JointRefits(calibration, split, keep, schedule, written, joint_steps)
    recovery = dict(start.recovery)
    twin = TwinRun(host, schedule, split.batches, written, split.device, segments=tuple(joints.segments.values()))
    upto = mask_upto(schedule, calibration.structure, keep)
    try:
        for number, point in enumerate(schedule.points, start=1):
            if twin.drifts(point) or point.consumer.weight in written:
                layer = _Refit(calibration, point, keep, written)
                if layer.inputs <= most_inputs(point.consumer.kernel):
                    refit = partial(layer.refit, twin, split)
                    if not joint_steps:
                        kind = "in sequence", point.node, split.size
                        refit = partial(calibration.cache, kind, upto[point.node], refit, MASKS)
                    with surviving("the refit in sequence", point.consumer.name):
                        tensors, recovery[point.consumer.name] = refit()
                        written |= settled(calibration.structure, {}, tensors, keep)
                        twin.write({name: written[name] for name in tensors})
            written |= joints.refit(twin, point, written)
            progress("recover", number, len(schedule.points))
    finally:
        twin.close()
    return assemble(calibration, keep, written, recovery)


class _Refit:
    """One layer to be refitted: what it keeps, and the weights it starts from."""

    def __init__(
        self, calibration: Calibration, point: RefitPoint, keep: Tensor, written: Mapping[str, Tensor]
    ) -> None:
        structure, self._refit_point, self.consumer = calibration.structure, point, point.consumer
        self._original = calibration.parameters[self.consumer.weight]
        device = self._original.device
        self._kept = structure.keep_indices(self.consumer.inputs, keep).nonzero().squeeze(1).to(device)
        self._made = structure.keep_indices(self.consumer.outputs, keep).nonzero().squeeze(1).to(device)
        self._prior = written.get(self.consumer.weight, self._original)
        calls = (product for product in structure.products if product.weight == self.consumer.weight)
        self._bias = next(product.bias for product in calls if product.node == point.node)
        self._biases = {name: written.get(name, calibration.parameters.get(name)) for name in self.consumer.biases}
        self.inputs = len(self._kept) * self.consumer.kernel
        self._method = sequential_method(calibration)
        chain = calibration.traced.activations[self.consumer.name] if self._method.weighting == "slope" else None
        self._activation = chain.bind(calibration.parameters) if chain is not None else None

    def refit(self, twin: TwinRun, split: Split) -> tuple[dict[str, Tensor], Recovery]:
        """The layer's new weight and bias, and how well they recover its output on held-out images."""
        seen, held = (self._pairs(twin, split, places) for places in (split.fit, split.held))
        prior = self._features(self._prior)
        ridges = self._method.ridges
        candidates = seen.fits(prior, ridges, self.consumer.name)
        errors = held.errors(candidates).sum(dim=1)
        best = candidates[int(errors.argmin())]
        residual = float(errors.min() / held.variance().sum().clamp(min=1e-300))
        inputs = self.inputs // self.consumer.parts
        recovery = Recovery(residual, best.amount, best.condition, inputs, int(seen.effective))
        return self._tensors(best, seen), recovery

    def _pairs(self, twin: TwinRun, split: Split, places: Sequence[int]) -> Pairs:
        centred, device = bool(self.consumer.biases), self._original.device
        found = Collector(self.inputs, len(self._made), device, centred=centred, parts=self._parts())
        generator = torch.Generator().manual_seed(self._method.seed)
        for place, batch in zip(places, twin.visit(self._refit_point, places), strict=True):
            mask = flags_for(batch.inputs.shape, counted(split.batches[place]))
            for rows, weights in self._rows(batch, generator, self._fixed(twin), mask):
                found.update(rows, weights)
        return found.pairs()

    def _parts(self) -> Tensor | None:
        """In which part of a grouped convolution each regressor and each target lies."""
        parts, kernel = self.consumer.parts, self.consumer.kernel
        if parts == 1:
            return None
        read = self._kept.repeat_interleave(kernel) // (len(self.consumer.inputs) // parts)
        return torch.cat([read, self._made // (len(self.consumer.outputs) // parts)])

    def _fixed(self, twin: TwinRun) -> Tensor | None:
        """The kept part of a bias that the layer adds and that must stay what it is, as others read it too."""
        bias = None if self._biases or self._bias is None else twin.stored(self._bias)
        return None if bias is None else bias[self._made]

    def _rows(
        self, batch: RefitBatch, generator: torch.Generator, fixed: Tensor | None, mask: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Kept inputs and what the weights are to make of them, side by side, with the weight of each row."""
        dim = 1 if batch.window is not None else -1
        inputs = batch.inputs.index_select(dim, self._kept)
        made = torch.cat([batch.target.index_select(dim, self._made), batch.outputs], dim=dim)
        for rows, both in paired_rows(inputs, made, batch.window, self._method.positions, generator, mask):
            targets, outputs = both[:, : len(self._made)], both[:, len(self._made) :]
            weights = sensitivity(outputs, self._activation) if self._activation is not None else None
            targets = targets if fixed is None else targets - fixed
            yield torch.cat([rows, targets], dim=1), weights

    def _features(self, weight: Tensor) -> Tensor:
        """The kept part of a weight as float64 (d, N)."""
        turned = self.consumer.spread(weight.detach().double()).movedim(self.consumer.input_dim, 1)
        return turned[self._made][:, self._kept].flatten(1).T

    def _tensors(self, fitted: Fitted, seen: Pairs) -> dict[str, Tensor]:
        """Weight and biases at full size: zero where an input is pruned, as before where an output is."""
        weight = self.consumer.spread(self._prior.detach()).clone()
        turned = weight.movedim(self.consumer.input_dim, 1)
        rows = fitted.weight.T.reshape(len(self._made), len(self._kept), *turned.shape[2:]).to(weight.dtype)
        turned[self._made[:, None], self._kept[None, :]] = rows
        written = {self.consumer.weight: self.consumer.gathered(weight)}
        inputs, targets = (mean.abs() for mean in seen.means)
        terms = targets + inputs @ fitted.weight.abs()
        for name, before in self._biases.items():
            bias = torch.zeros(turned.shape[0], dtype=weight.dtype, device=weight.device) if before is None else before
            bias = bias.detach().clone()
            bias[self._made] = moved(bias[self._made].double(), fitted.bias, terms, bias.dtype).to(bias.dtype)
            written[name] = bias
        return written
