"""Output error: how far a changed network's outputs are from the original's, without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from recoup.errors import CalibrationError
from recoup.graph.standalone import Standalone
from recoup.inputs.batches import Inputs, call_checked, tensors_in
from recoup.inputs.padding import counted

# Between which factors on class scores the best one is looked for, and by how many sections.
GAINS = (0.5, 2.0)
SECTIONS = 20


class Reference:
    """The original's outputs on some batches, to compare with.

    For class scores (n, classes), or (n, classes, ...) if asked for, the error is the mean Kullback-Leibler divergence
    in nats, otherwise the squared error relative to the variance of the outputs, averaged over them.
    """

    def __init__(
        self, host: Standalone, batches: Sequence[Inputs], outputs: str = "auto", numbers: Sequence[object] = ()
    ) -> None:
        """`numbers` are what messages call the batches by."""
        self._host, self._batches, self._kind = host, batches, outputs
        self._numbers = numbers or range(1, len(batches) + 1)
        self._names = {name for name, _ in [*host.named_parameters(), *host.named_buffers()]}
        self._expected = self._run({})
        if not all(self._expected):
            raise CalibrationError(
                "the model returns no real values with a dim for samples, so nothing can be compared with the "
                "original. Prune the part of it that makes scores or features, or use method='paper', which compares "
                "nothing."
            )

    def part(self, images: int) -> Reference:
        """The same on fewer images, at least so many of them, taken evenly: they may be in any order."""
        step = sum(batch.size for batch in self._batches) // images
        if step < 2:
            return self
        batches, numbers, count = [], [], 0
        for batch, number in zip(self._batches, self._numbers, strict=True):
            chosen = torch.arange(count, count + batch.size) % step == 0
            count += batch.size
            if bool(chosen.any()):
                batches.append(batch.pick(chosen))
                numbers.append(number)
        return Reference(self._host, batches, self._kind, numbers)

    def error(self, tensors: Mapping[str, Tensor]) -> float:
        """The output error of the network with other tensors."""
        return self._mean(self._run(tensors), lambda expected, actual: output_error(expected, actual, self._kind))

    def errors(
        self, changes: Sequence[Mapping[str, Tensor]], progress: Callable[[float], None] = lambda _: None
    ) -> list[float]:
        """The output errors of networks with other tensors; operations in front of what changes run once for all.

        `progress` is told the share of the batches that are done.
        """
        if not self._host.is_pure:
            return [self.error(tensors) for tensors in changes]
        sums = [0.0] * len(changes)
        with torch.no_grad():
            for done, parts in enumerate(zip(self._batches, self._numbers, self._expected, strict=True), start=1):
                for place, error in enumerate(self._errors_in(*parts, changes)):
                    sums[place] += error * len(parts[-1][0])
                progress(done / len(self._batches))
        samples = sum(len(expected[0]) for expected in self._expected)
        return [total / samples for total in sums]

    def _errors_in(
        self, batch: Inputs, number: object, expected: list[Tensor], changes: Sequence[Mapping[str, Tensor]]
    ) -> list[float]:
        found, mask = [math.nan] * len(changes), counted(batch)

        def look(place: int, result: Any) -> None:
            found[place] = float(output_error(expected, _compared(result, mask), self._kind))

        def run(*args: Any, **kwargs: Any) -> None:
            self._host.run_each(changes, look, args, kwargs)

        call_checked(run, batch, number)
        return found

    def gain(self, tensors: Mapping[str, Tensor]) -> float:
        """The factor on the class scores with which the error is least, 1 where there are none.

        The divergence is convex in that factor, so a golden section finds it. Values that merely have the shape of
        class scores have a divergence too, and the factor would ruin them.
        """
        if not all(_are_classes(expected, self._kind) for expected in self._expected):
            return 1.0
        found = self._run(tensors)

        def error(factor: float) -> float:
            return self._mean(found, lambda expected, actual: _divergence(expected[0], factor * actual[0]))

        best = golden_section(error, *GAINS)
        return best if error(best) < error(1.0) else 1.0

    def _mean(self, found: Sequence[list[Tensor]], between: Callable[[list[Tensor], list[Tensor]], Tensor]) -> float:
        """The mean over all samples of what lies between the expected outputs of a batch and those found."""
        sizes = [len(expected[0]) for expected in self._expected]
        parts = [between(*pair).cpu() * size for *pair, size in zip(self._expected, found, sizes, strict=True)]
        return float(torch.stack(parts).sum()) / sum(sizes)

    def _run(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        changed = {name: value for name, value in tensors.items() if name in self._names}
        with torch.no_grad():
            pairs = zip(self._batches, self._numbers, strict=True)
            return [self._outputs(batch, number, changed) for batch, number in pairs]

    def _outputs(self, batch: Inputs, number: object, changed: dict[str, Tensor]) -> list[Tensor]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self._host, changed, args, kwargs)

        return _compared(call_checked(run, batch, number), counted(batch))


def _compared(result: Any, mask: Tensor | None) -> list[Tensor]:
    """What is compared of a result."""
    found = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.dim()]
    return [_without_padding(tensor, mask) for tensor in found]


def _without_padding(output: Tensor, mask: Tensor | None) -> Tensor:
    """Outputs at the positions that count (positions, 1, values), or as they are where they have no such positions."""
    if mask is None or output.dim() < 3 or output.shape[:2] != mask.shape or not bool(mask.any()):
        return output
    return output[mask.to(output.device)][:, None]


def output_error(expected: Sequence[Tensor], actual: Sequence[Tensor], kind: str = "auto") -> Tensor:
    """The output error in one batch, for all the outputs of two networks."""
    if _are_classes(expected, kind):
        return _divergence(expected[0], actual[0])
    errors = [_relative_error(a, b) for a, b in zip(expected, actual, strict=True)]
    return torch.stack(errors).mean()


def _are_classes(outputs: Sequence[Tensor], kind: str) -> bool:
    if kind == "classes":
        return outputs[0].dim() >= 2 and outputs[0].shape[1] > 1
    return kind == "auto" and len(outputs) == 1 and outputs[0].dim() == 2 and outputs[0].shape[1] > 1


def _divergence(expected: Tensor, actual: Tensor) -> Tensor:
    target, found = expected.double().log_softmax(dim=1), actual.double().log_softmax(dim=1)
    return (target.exp() * (target - found)).sum(dim=1).mean()


def golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with a single minimum has it.

    >>> round(golden_section(lambda x: (x - 1.25) ** 2, 0.5, 2.0), 3)
    1.25
    """
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(SECTIONS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _relative_error(expected: Tensor, actual: Tensor) -> Tensor:
    expected, actual = expected.double(), actual.double()
    centre = expected.mean(dim=0, keepdim=True) if len(expected) > 1 else expected.mean()
    spread = (expected - centre).square().mean()
    return (expected - actual).square().mean() / spread.clamp(min=torch.finfo(torch.float32).tiny)
