"""Losses: cross-entropy with labels, and the divergence from a teacher's answers.

    distillation   T² KL(softmax(t / T) || softmax(s / T))     s: scores, t: the teacher's, T: temperature

The factor T² keeps the size of gradients as T grows (Hinton, Vinyals, Dean 2015, arXiv 1503.02531).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recoup.errors import CalibrationError, UsageError, shown, told


def scores_in(outputs: Any) -> Tensor:
    """Class scores (n, classes, ...) in float32, from whatever a model returns.

    Raises:
        UsageError: there are none.
    """
    if isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    if isinstance(outputs, Mapping) and outputs:
        outputs = outputs.get("logits", next(iter(outputs.values())))
    scores = getattr(outputs, "logits", outputs)
    if not isinstance(scores, Tensor) or scores.dim() < 2 or scores.shape[1] < 2 or not scores.is_floating_point():
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise UsageError(
            f"training needs class scores of shape (samples, classes, ...), the model returned {found}. Give a model "
            "that returns them alone or first, or train with a loop of your own."
        )
    return scores if scores.dtype is torch.float64 else scores.float()


def on_labels(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of scores (n, classes, ...) with labels (n, ...), each smoothed over all classes."""
    return F.cross_entropy(scores, labels, label_smoothing=smoothing)


def on_teacher(scores: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T² times the mean divergence of softened answers from the teacher's, over samples and positions.

    Raises:
        UsageError: the teacher returns scores of another shape.
    """
    if scores.shape != target.shape:
        raise UsageError(
            f"the teacher returns scores of shape {tuple(target.shape)}, the model {tuple(scores.shape)}. Give a "
            "teacher with the same outputs."
        )
    expected, found = (F.log_softmax(each / temperature, dim=1) for each in (target, scores))
    divergence = (expected.exp() * (expected - found)).sum(dim=1).mean()
    return temperature**2 * divergence


def class_numbers(given: Any, number: int) -> Tensor:
    """The labels of a batch as whole numbers, of which derivatives may be kept.

    Raises:
        CalibrationError: they are something else.
    """
    try:
        labels = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise CalibrationError(
            f"the labels of training batch {number} are no numbers ({told(error)}): got {shown(given)}."
        ) from error
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise CalibrationError(
            f"the labels of training batch {number} are of {labels.dtype}. Give class numbers; turn one-hot or soft "
            "labels into numbers with argmax(1)."
        )
    if labels.layout is not torch.strided or labels.is_nested or labels.is_quantized:
        raise CalibrationError(
            f"the labels of training batch {number} are sparse, nested or quantised. Give a dense tensor, as "
            "labels.to_dense() does."
        )
    if labels.is_meta:
        raise CalibrationError(
            f"the labels of training batch {number} are on the meta device, which has no values. Give real ones."
        )
    return labels.clone().long() if labels.is_inference() else labels.long()


def require_labels_fit(labels: Tensor, scores: Tensor, number: int) -> Tensor:
    """The labels in the shape that the scores ask for.

    Raises:
        CalibrationError: there is not one label for each sample, or position of it.
    """
    wanted = (scores.shape[0], *scores.shape[2:])
    if labels.shape != wanted and labels.shape != (*wanted, 1):
        raise CalibrationError(
            f"training batch {number} has labels of shape {tuple(labels.shape)} for scores of shape "
            f"{tuple(scores.shape)}. Give one class number for each sample."
        )
    return labels.reshape(wanted)


def require_known_classes(labels: Tensor, classes: int, number: int) -> None:
    """Refuse class numbers that the model has no score for."""
    if not labels.numel():
        raise CalibrationError(f"training batch {number} has labels of shape {tuple(labels.shape)}: none at all.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise CalibrationError(
            f"the labels of training batch {number} go from {low} to {high}, but the model has {classes} scores, "
            f"numbered 0 to {classes - 1}. Number the classes as the model does."
        )
