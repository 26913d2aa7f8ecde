"""How far a changed network's outputs are from the original's, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from recoup.batches import Inputs, call_checked, tensors_in
from recoup.structure.standalone import Standalone


class Reference:
    """The original's outputs on some batches, to compare with.

    For class scores (n, classes) the harm is the mean Kullback-Leibler divergence in nats, otherwise the squared error
    relative to the variance of the outputs, averaged over them.
    """

    def __init__(
        self, host: Standalone, batches: Sequence[Inputs], outputs: str = "auto", numbers: Sequence[object] = ()
    ) -> None:
        """`numbers` are what messages call the batches by."""
        self._host, self._batches, self._kind = host, batches, outputs
        self._numbers = numbers or range(1, len(batches) + 1)
        self._names = {name for name, _ in [*host.named_parameters(), *host.named_buffers()]}
        self._expected = self._run({})

    def harm(self, tensors: Mapping[str, Tensor]) -> float:
        """The harm of running the network with other tensors."""
        total = torch.zeros((), dtype=torch.float64)
        for expected, actual in zip(self._expected, self._run(tensors), strict=True):
            total += harm_between(expected, actual, self._kind).cpu() * len(expected[0])
        return float(total) / sum(len(expected[0]) for expected in self._expected)

    def _run(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        changed = {name: value for name, value in tensors.items() if name in self._names}
        with torch.no_grad():
            pairs = zip(self._batches, self._numbers, strict=True)
            return [self._outputs(batch, number, changed) for batch, number in pairs]

    def _outputs(self, batch: Inputs, number: object, changed: dict[str, Tensor]) -> list[Tensor]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self._host, changed, args, kwargs)

        result = call_checked(run, batch, number)
        return [tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.dim()]


def harm_between(expected: Sequence[Tensor], actual: Sequence[Tensor], kind: str = "auto") -> Tensor:
    """The harm in one batch, for all the outputs of two networks."""
    are_classes = kind == "classes" or (kind == "auto" and len(expected) == 1 and expected[0].dim() == 2)
    if are_classes and expected[0].dim() == 2 and expected[0].shape[1] > 1:
        target, found = expected[0].double().log_softmax(dim=1), actual[0].double().log_softmax(dim=1)
        return (target.exp() * (target - found)).sum(dim=1).mean()
    errors = [_relative_error(a.double(), b.double()) for a, b in zip(expected, actual, strict=True)]
    return torch.stack(errors).mean()


def _relative_error(expected: Tensor, actual: Tensor) -> Tensor:
    centre = expected.mean(dim=0, keepdim=True) if len(expected) > 1 else expected.mean()
    spread = (expected - centre).square().mean()
    return (expected - actual).square().mean() / spread.clamp(min=torch.finfo(torch.float32).tiny)
