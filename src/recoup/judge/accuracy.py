"""Measuring a model: accuracy in points, and the divergence of its predictions from another model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from recoup.config import is_number, require_whole
from recoup.errors import CalibrationError, UsageError, VerificationError, require_kind, shown, told
from recoup.graph.copies import duplicate
from recoup.graph.modes import evaluating
from recoup.inputs.batches import Inputs, Stream, device_of, numbered_inputs
from recoup.inputs.labels import is_labelled, labels_in
from recoup.inputs.surroundings import as_the_caller, undisturbed

Evaluate: TypeAlias = Callable[[nn.Module], float]
NO_LABELS = (
    "validation batches carry no labels, so accuracy cannot be measured. Give (inputs, labels) pairs, pass `evaluate=` "
    "with a measure of your own, or ask for a `budget=`, which needs no labels."
)

# Of so many classes or fewer, five are nothing to tell.
FEW_CLASSES = 10
_CHECK = "Check its weights, the batch, and how the inputs are normalised."


@undisturbed
def accuracy(model: nn.Module, batches: Iterable[Any], *, top: int = 1) -> float:
    """Percentage of samples whose label is the place of the largest output, or of one of the `top` largest.

    Raises:
        CalibrationError: a batch, its labels or what is returned for it cannot be used.
        UsageError: the model has fewer than `top` classes.
    """
    require_whole("top", top)
    seen = _read_labelled(model, batches)
    if top > seen.classes:
        raise UsageError(
            f"top={top}: {type(model).__name__} has {seen.classes} classes, so that every label would be right. Ask "
            "for fewer."
        )
    return seen.top(top)


@undisturbed
def accuracies(model: nn.Module, batches: Iterable[Any]) -> tuple[float, float | None]:
    """Top-1 accuracy of labelled batches, and top-5 where there are more than ten classes, from one pass."""
    seen = _read_labelled(model, batches)
    return seen.top(1), seen.top5


def _read_labelled(model: nn.Module, batches: Iterable[Any]) -> Answers:
    device_of(model)
    stream = Stream(batches, "validation")
    if not is_labelled(stream.first, model):
        raise CalibrationError(NO_LABELS)
    return read_answers(duplicate(model), stream)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """One pass over batches: for every sample the place of the largest output (n,), the label (n,) where there is one,
    and a number made of its inputs, by which another pass can be seen to have the same samples in the same order (n,).

    `classes` is how many outputs there are; `places` how many of them come before the label's (n,).
    """

    answers: Tensor
    labels: Tensor | None
    marks: Tensor
    classes: int
    places: Tensor | None = None

    @property
    def top5(self) -> float | None:
        """Top-5 accuracy; None without labels, and with ten classes or fewer."""
        return None if self.places is None or self.classes <= FEW_CLASSES else self.top(5)

    def top(self, count: int) -> float:
        """Percentage of samples whose label is among the `count` largest outputs."""
        assert self.labels is not None and self.places is not None
        # One answer is what the model would say itself, also among equal outputs.
        right = self.answers == self.labels if count == 1 else self.places < count
        return 100.0 * float(right.double().mean())


def read_answers(model: nn.Module, batches: Iterable[Any], *, is_candidate: bool = False) -> Answers:
    """What a model of ours answers, and to what; a failure of a candidate is not its data's.

    Raises:
        CalibrationError: a batch, its labels or what is returned for it cannot be used.
        VerificationError: the candidate fails.
    """
    device = device_of(model)
    stream = batches if isinstance(batches, Stream) else Stream(batches, "validation")
    has_labels = is_labelled(stream.first, model)
    answers, labels, places, marks, classes = [], [], [], [], 0
    with evaluating(model):
        for number, batch in enumerate(stream, start=1):
            inputs = numbered_inputs(batch, model, number, "validation")
            if is_labelled(batch, model) is not has_labels:
                raise CalibrationError(f"validation batch {number} and the first one: one has labels, the other none.")
            marks.append(_marks(inputs))
            outputs = _outputs(model, inputs.to(device), number, is_candidate=is_candidate)
            scores = _scores(outputs, inputs.size)
            classes = scores.shape[1]
            if not is_candidate and bool(scores.isnan().all()):
                raise CalibrationError(f"{type(model).__name__} returns NaN for validation batch {number}. {_CHECK}")
            if has_labels:
                labels.append(_labels(labels_in(batch, model), inputs.size, classes, number).to(device))
                places.append(_places(scores, labels[-1]))
            answers.append(scores.argmax(dim=1))
    truth, order = (torch.cat(parts) if has_labels else None for parts in (labels, places))
    return Answers(torch.cat(answers), truth, torch.cat(marks), classes, order)


@undisturbed
def divergence(model: nn.Module, original: nn.Module, batches: Iterable[Any]) -> float:
    """Mean Kullback-Leibler divergence of the model's class probabilities from the original's, in nats."""
    require_kind("original", original, nn.Module, "a torch.nn.Module")
    device = device_of(model)
    model, original = duplicate(model), duplicate(original)
    stream = Stream(batches, "validation")
    total, seen = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(model), evaluating(original):
        for number, batch in enumerate(stream, start=1):
            inputs = numbered_inputs(batch, model, number, "validation").to(device)
            scores = [_scores(_outputs(each, inputs.copy(), number), inputs.size) for each in (original, model)]
            if scores[0].shape != scores[1].shape:
                raise CalibrationError(
                    f"the two models return {scores[1].shape[1]} and {scores[0].shape[1]} scores, so that they cannot "
                    "be compared."
                )
            target, actual = (each.double().log_softmax(dim=1) for each in scores)
            total += (target.exp() * (target - actual)).sum()
            seen += inputs.size
    return float(total) / seen


def checked(evaluate: Evaluate) -> Evaluate:
    """`evaluate` with a clear error when it returns no finite number."""

    def measure(model: nn.Module) -> float:
        with as_the_caller():
            value: Any = evaluate(model)
        number = (
            value.item()
            if isinstance(value, (Tensor, np.ndarray)) and value.shape.count(1) == len(value.shape)
            else value
        )
        if not is_number(number) or not math.isfinite(number):
            raise CalibrationError(
                f"evaluate(model) must return a finite number of points, it returned {shown(value)}."
            )
        return float(number)

    return measure


def _outputs(model: nn.Module, inputs: Inputs, number: int, *, is_candidate: bool = False) -> Any:
    try:
        return inputs.call(model)
    except Exception as error:  # user code
        if is_candidate:
            raise VerificationError(
                f"a candidate could not be measured ({told(error)}). Please report the model: its code depends on "
                "sizes in a way that was not seen."
            ) from error
        raise CalibrationError(
            f"validation batch {number} with samples of shape {inputs.sample_shapes()} makes {type(model).__name__} "
            f"fail ({told(error)}). Give batches of the form that the model takes."
        ) from error


def _marks(inputs: Inputs) -> Tensor:
    """The sum of all that is real in the inputs of every sample (n,)."""
    size = inputs.size
    parts = [tensor for tensor in inputs.tensors() if tensor.dim() and len(tensor) == size and not tensor.is_complex()]
    sums = [tensor.nan_to_num().reshape(size, -1).sum(dim=1, dtype=torch.float64).cpu() for tensor in parts]
    return torch.stack(sums).sum(dim=0) if sums else torch.zeros(size, dtype=torch.float64)


def _labels(given: Any, samples: int, classes: int, number: int) -> Tensor:
    """Class numbers (samples,), each of them one of the model's outputs."""
    try:
        labels = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CalibrationError(
            f"the labels of validation batch {number} are no numbers ({told(error)}): got {shown(given)}. Give class "
            "numbers, one for each sample."
        ) from error
    is_whole = not (labels.is_floating_point() or labels.is_complex()) and labels.layout is torch.strided
    if labels.shape not in ((samples,), (samples, 1)) or not is_whole or labels.is_meta:
        raise CalibrationError(
            f"labels must be {samples} class numbers, one for each sample, got {tuple(labels.shape)} {labels.dtype} "
            f"in validation batch {number}. Turn one-hot or soft labels into numbers with argmax(1)."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise CalibrationError(
            f"the labels of validation batch {number} go from {low} to {high}, but the model has {classes} outputs, "
            f"numbered 0 to {classes - 1}. Number the classes as the model does, and leave out images without a label."
        )
    return labels.view(samples).long()


def _places(scores: Tensor, labels: Tensor) -> Tensor:
    """How many outputs come before the label's (samples,): larger ones, no numbers, and of equal ones the first."""
    own = scores.gather(1, labels[:, None])
    before = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    is_alike = (scores == own) | (scores.isnan() & own.isnan())
    ahead = (scores > own) | (scores.isnan() & ~own.isnan()) | (is_alike & before)
    return ahead.sum(dim=1)


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
