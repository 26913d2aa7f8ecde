"""Labels beside the inputs of a batch: the second half of a pair, or the entry `labels` of a dict."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LABELS = "labels"
# Sequence-to-sequence classes make what their decoder reads of the labels, by a method of this name.
_DECODED, _MAKE_DECODED = "decoder_input_ids", "prepare_decoder_input_ids_from_labels"


def class_numbers(given: Any, samples: int) -> Tensor | None:
    """The second half of a batch as class numbers (samples,), or None where it is something else."""
    try:
        labels = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool)
    is_plain = labels.layout is torch.strided and not labels.is_meta and type(labels) in (Tensor, torch.nn.Parameter)
    if not (is_whole and is_plain) or labels.shape not in ((samples,), (samples, 1)):
        return None
    return labels.detach().reshape(samples).long()


def is_labelled_pair(batch: Any, model: nn.Module) -> bool:
    """Whether a batch carries labels beside its inputs."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return False
    return required_inputs(model) <= 1 or isinstance(batch[0], (tuple, list, Mapping))


def labels_in(batch: Any, model: nn.Module) -> Any:
    """What a batch carries beside its inputs, of whatever form; None if nothing."""
    if is_labelled_pair(batch, model):
        return batch[1]
    return batch[LABELS] if is_labelled_dict(batch, model) else None


def is_labelled(batch: Any, model: nn.Module) -> bool:
    """Whether a batch carries labels to measure by: those of a pair, or one class number per sample in a dict."""
    if not is_labelled_dict(batch, model):
        return is_labelled_pair(batch, model)
    size = next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()), 1)
    return class_numbers(batch[LABELS], size) is not None


def is_labelled_dict(batch: Any, model: nn.Module) -> bool:
    """Whether a dict of keyword inputs holds labels, which the model's forward pass does not need."""
    return isinstance(batch, Mapping) and LABELS in batch and not _requires(model, LABELS)


def without_labels(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The keyword inputs of a batch; in the place of labels is what the model's decoder reads, where it has one."""
    if not is_labelled_dict(batch, model):
        return dict(batch)
    rest = {name: value for name, value in batch.items() if name != LABELS}
    make = getattr(model, _MAKE_DECODED, None)
    if make is None or _DECODED in rest or not isinstance(batch[LABELS], Tensor):
        return rest
    return {**rest, _DECODED: make(batch[LABELS])}


def required_inputs(model: nn.Module) -> int:
    """How many positional inputs the model's `forward` cannot do without."""
    names: Any = getattr(model, "input_names", None)
    if names is not None:  # a standalone model knows what it was captured with
        return len(names)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _requires(model: nn.Module, name: str) -> bool:
    names: Any = getattr(model, "input_names", None)
    if names is not None:  # a standalone model knows what it was captured with
        return name in names
    try:
        parameter = inspect.signature(model.forward).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty
