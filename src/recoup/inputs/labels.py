"""Class numbers beside the inputs of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
