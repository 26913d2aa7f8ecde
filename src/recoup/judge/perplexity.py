"""Perplexity of a language model: how many tokens it hesitates between, by the likelihood of the right ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup.config import require_flag
from recoup.errors import CalibrationError
from recoup.graph.copies import duplicate
from recoup.graph.modes import evaluating
from recoup.graph.settings import without_cache
from recoup.inputs.batches import Inputs, Stream, call_checked, device_of, numbered_inputs
from recoup.inputs.labels import labels_in
from recoup.inputs.padding import counted
from recoup.inputs.surroundings import undisturbed

# What transformer libraries put in the place of a label that does not count.
IGNORED = -100


@undisturbed
def perplexity(model: nn.Module, batches: Iterable[Any], *, shifted: bool = True) -> float:
    """exp of the mean negative log-likelihood of the tokens, in nats; 1 is perfect, and lower is better.

    Scores (samples, positions, tokens) are the model's first output, or its `logits`. The right tokens are the `labels`
    of a batch, -100 where none counts, or else its inputs themselves. Those with a zero in the `attention_mask` do not
    count. Scores at a position are for the next token; with `shifted=False` they are for the token there, as those of
    masked language models and of sequence-to-sequence models are.

    Raises:
        CalibrationError: a batch, its labels or what is returned for it cannot be used.
    """
    require_flag("shifted", shifted)
    device, twin = device_of(model), without_cache(duplicate(model))
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(twin):
        for number, batch in enumerate(Stream(batches, "validation"), start=1):
            inputs = numbered_inputs(batch, model, number, "validation").to(device)
            scores = _scores(call_checked(twin, inputs, number, "validation"), number)
            targets = _targets(labels_in(batch, model), inputs, scores, number)
            if shifted:
                scores, targets = scores[:, :-1], targets[:, 1:]
            total += functional.cross_entropy(
                scores.double().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            count += int((targets != IGNORED).sum())
    if not count:
        raise CalibrationError("no token of the validation batches counts: they have no labels, or are all padding.")
    return math.exp(float(total) / count)


def _scores(outputs: Any, number: int) -> Tensor:
    """Scores (samples, positions, tokens) from whatever the model returns."""
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    scores = getattr(first, "logits", first)
    if not isinstance(scores, Tensor) or scores.dim() != 3:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise CalibrationError(
            f"perplexity needs scores of shape (samples, positions, tokens), alone, first or as .logits; the model "
            f"returned {found} for validation batch {number}. Measure it by a function of your own."
        )
    return scores


def _targets(labels: Any, inputs: Inputs, scores: Tensor, number: int) -> Tensor:
    """The right tokens (samples, positions), `IGNORED` where none counts."""
    whole = [tensor for tensor in inputs.tensors() if not tensor.is_floating_point()]
    given = inputs.kwargs.get("input_ids", whole[0] if whole else None) if labels is None else labels
    targets = torch.as_tensor(given).to(scores.device).long() if given is not None else torch.zeros(0)
    if targets.shape != scores.shape[:2]:
        raise CalibrationError(
            f"the tokens of validation batch {number} have the shape {tuple(targets.shape)}, the scores "
            f"{tuple(scores.shape)}. Give `labels`, one token for every position that is scored."
        )
    mask = counted(inputs)
    if mask is not None and mask.shape == targets.shape:
        targets = targets.masked_fill(~mask, IGNORED)
    outside = (targets != IGNORED) & ((targets < 0) | (targets >= scores.shape[2]))
    if bool(outside.any()):
        raise CalibrationError(
            f"a token of validation batch {number} is {int(targets[outside][0])}, but the model scores "
            f"{scores.shape[2]} of them, numbered from 0. Use the tokeniser that belongs to the model."
        )
    return targets
