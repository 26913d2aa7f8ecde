"""Accuracy after an epoch, and whether it can be measured at all, which is said before the first one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import CalibrationError
from recoup.graph.copies import working_copy
from recoup.inputs.batches import Stream, call_checked, device_of, numbered_inputs
from recoup.inputs.labels import is_labelled
from recoup.judge.accuracy import accuracy
from recoup.training.record import Epoch


def measured(epoch: Epoch, model: nn.Module, validation: Iterable[Any]) -> Epoch:
    """An epoch with its accuracy."""
    return replace(epoch, accuracy=accuracy(model, validation))


def require_measurable(model: nn.Module, validation: Iterable[Any]) -> None:
    """Refuse validation whose first batch accuracy could not be measured on.

    Raises:
        CalibrationError: it has no labels, or the model returns no class scores (samples, classes) for it.
    """
    batch = Stream(validation, "validation").first
    if not is_labelled(batch, model):
        raise CalibrationError(
            "validation batch 1 has no labels, so accuracy cannot be measured. Give pairs (inputs, labels), or leave "
            "validation= out."
        )
    _require_scores(model, batch)
    accuracy(model, [batch])


def _require_scores(model: nn.Module, batch: Any) -> None:
    inputs = numbered_inputs(batch, model, 1, "validation").to(device_of(model))
    with torch.no_grad():
        outputs = call_checked(working_copy(model), inputs, 1, "validation")
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    scores = getattr(first, "logits", first)
    if not isinstance(scores, Tensor) or scores.dim() != 2 or len(scores) != inputs.size:
        found = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise CalibrationError(
            f"validation measures accuracy, which needs class scores (samples, classes), alone, first or as .logits; "
            f"the model returned {found} for {inputs.size} samples. Leave validation= out, and measure the result by "
            "a function of your own."
        )
