"""Which positions of a batch count: those that its attention mask does not call padding."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.inputs.batches import Inputs

MASK = "attention_mask"
# A model that reads two sequences has positions of both kinds, and shapes do not tell them apart.
_SECOND = "decoder_input_ids"


def counted(inputs: Inputs) -> Tensor | None:
    """The positions of a batch that count (samples, positions), bool; None where there is no mask, or one of two."""
    mask = inputs.kwargs.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or _SECOND in inputs.kwargs:
        return None
    return mask > 0 if mask.dtype is not torch.bool else mask


def flags_for(shape: torch.Size, mask: Tensor | None) -> Tensor | None:
    """The mask for values of this shape whose last dim is that of features; None where it cannot be laid over them."""
    if mask is None or len(shape) < 2:
        return None
    if shape[:2] == mask.shape and len(shape) == 3:
        return mask
    return mask.flatten() if len(shape) == 2 and shape[0] == mask.numel() else None


def has_padding(mask: Tensor | None) -> bool:
    """Whether some positions do not count."""
    return mask is not None and not bool(mask.all())
