"""Measuring a model: top-1 accuracy in points, and the divergence of its predictions from another model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recoup.errors import CalibrationError
from recoup.graph.modes import evaluating
from recoup.inputs.batches import Inputs, Stream, device_of, inputs_of, is_labelled_pair

Evaluate: TypeAlias = Callable[[nn.Module], float]
NO_LABELS = (
    "validation batches carry no labels, so accuracy cannot be measured. Give (inputs, labels) pairs, pass `evaluate=` "
    "with a measure of your own, or ask for a `budget=`, which needs no labels."
)


def accuracy(model: nn.Module, batches: Iterable[Any]) -> float:
    """Percentage of samples whose largest output is at the label's place."""
    stream = Stream(batches, "validation")
    if not is_labelled_pair(stream.first, model):
        raise CalibrationError(NO_LABELS)
    device = device_of(model)
    right, seen = torch.zeros((), dtype=torch.long, device=device), 0
    with evaluating(model):
        for batch in stream:
            inputs = inputs_of(batch, model).to(device)
            labels = _labels(batch[1], inputs.size).to(device)
            scores = _scores(inputs.call(model), len(labels))
            right += (scores.argmax(dim=1) == labels).sum()
            seen += len(labels)
    return 100.0 * int(right) / seen


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """One pass over batches: for every sample the place of the largest output (n,), the label (n,) where there is one,
    and a number made of its inputs, by which another pass can be seen to have the same samples in the same order (n,).
    """

    answers: Tensor
    labels: Tensor | None
    marks: Tensor


def read_answers(model: nn.Module, batches: Iterable[Any]) -> Answers:
    """What a model answers, and to what."""
    device, stream = device_of(model), Stream(batches, "validation")
    is_labelled = is_labelled_pair(stream.first, model)
    answers, labels, marks = [], [], []
    with evaluating(model):
        for batch in stream:
            inputs = inputs_of(batch, model)
            marks.append(_marks(inputs))
            if is_labelled:
                labels.append(_labels(batch[1], inputs.size).to(device))
            answers.append(_scores(inputs.to(device).call(model), inputs.size).argmax(dim=1))
    return Answers(torch.cat(answers), torch.cat(labels) if is_labelled else None, torch.cat(marks))


def divergence(model: nn.Module, original: nn.Module, batches: Iterable[Any]) -> float:
    """Mean Kullback-Leibler divergence of the model's class probabilities from the original's, in nats."""
    stream = Stream(batches, "validation")
    device = device_of(model)
    total, seen = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(model), evaluating(original):
        for batch in stream:
            inputs = inputs_of(batch, model).to(device)
            target = _scores(inputs.copy().call(original), inputs.size).double().log_softmax(dim=1)
            actual = _scores(inputs.call(model), inputs.size).double().log_softmax(dim=1)
            total += (target.exp() * (target - actual)).sum()
            seen += inputs.size
    return float(total) / seen


def checked(evaluate: Evaluate) -> Evaluate:
    """`evaluate` with a clear error when it returns no finite number."""

    def measure(model: nn.Module) -> float:
        value = evaluate(model)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise CalibrationError(f"evaluate(model) must return a finite number of points, it returned {value!r}.")
        return number

    return measure


def _marks(inputs: Inputs) -> Tensor:
    """The sum of all that is real in the inputs of every sample (n,)."""
    size = inputs.size
    parts = [tensor for tensor in inputs.tensors() if tensor.dim() and len(tensor) == size and not tensor.is_complex()]
    sums = [tensor.nan_to_num().reshape(size, -1).sum(dim=1, dtype=torch.float64).cpu() for tensor in parts]
    return torch.stack(sums).sum(dim=0) if sums else torch.zeros(size, dtype=torch.float64)


def _labels(given: Any, samples: int) -> Tensor:
    labels = torch.as_tensor(given)
    if labels.shape not in ((samples,), (samples, 1)) or labels.is_floating_point():
        raise CalibrationError(
            f"labels must be {samples} class numbers, one for each sample, got {tuple(labels.shape)} {labels.dtype}. "
            "Turn one-hot or soft labels into numbers with argmax(1)."
        )
    return labels.view(samples)


def _scores(outputs: Any, samples: int) -> Tensor:
    """Class scores (samples, classes) from whatever the model returns."""
    if isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != samples:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise CalibrationError(
            f"accuracy needs outputs of shape (samples, classes), the model returned {found} for {samples} samples. "
            "Pass `evaluate=` with a measure that fits this model."
        )
    return logits
