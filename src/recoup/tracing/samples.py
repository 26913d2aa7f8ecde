"""Whether samples lie along the first dim of a batch, as they have to, or steps of a sequence do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recoup.errors import CaptureError
from recoup.graph.copies import light_copy
from recoup.inputs.batches import Inputs, leaves_in

# Rounding differs between a call with one sample and one with two; a step of a sequence differs in its first digits.
ROUNDING = 1e-2


def require_samples_first(model: nn.Module, two: Inputs) -> None:
    """Refuse a model whose modules take sequences first, if its outputs do not follow the first dim of its inputs.

    `two` is a call with two samples. The second has to give alone what it gives behind the first.

    Raises:
        CaptureError: it does not.
    """
    name = next((name for name, module in model.named_modules() if getattr(module, "batch_first", None) is False), None)
    if name is None or two.size != 2:
        return
    try:
        with torch.no_grad():
            both = leaves_in(two.copy().call(light_copy(model, own_buffers=True)))
            second = leaves_in(two.pick(torch.tensor([1])).call(light_copy(model, own_buffers=True)))
    except Exception:  # user code; whether the model runs is found out, and told, by the capture
        return
    if any(_follows(a, b) for a, b in zip(both, second, strict=False)):
        return
    raise CaptureError(
        f"the outputs of {type(model).__name__} do not follow the first dimension of its inputs, {two.sample_shapes()} "
        f"behind it: {name or 'the model'} has batch_first=False, so steps lie there. Samples have to. Build it with "
        "batch_first=True, or wrap it in a module that calls model(x.transpose(0, 1)) and turns the outputs back."
    )


def _follows(both: object, second: object) -> bool:
    """Whether the last row of an output is what the second sample gives alone; what is no tensor tells nothing."""
    if not isinstance(both, Tensor) or not isinstance(second, Tensor) or not both.dim():
        return False
    last = both[both.shape[0] // 2 :]
    return last.shape == second.shape and _close(last, second)


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool(
        ((a - b).abs().nan_to_num() <= ROUNDING * (1e-12 + a.abs().nan_to_num(posinf=0, neginf=0).mean())).all()
    )
