"""The proof that the smaller model computes what the masked original computes, on a random batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import VerificationError, require_kind
from recoup.graph.copies import duplicate, working_copy
from recoup.graph.modes import exact_float32
from recoup.inputs.batches import Inputs, device_of, inputs_of, tensors_in
from recoup.inputs.surroundings import undisturbed
from recoup.plan import Plan
from recoup.surgery.apply import masked

# Largest allowed difference relative to the largest output: rounding of a deep network in each precision.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
COARSE = 5e-2  # half precision
# A network that amplifies rounding may differ by so many times its own, in every layer anew, but never by more than the
# second number: a wrong channel shows in the first digits.
AMPLIFIED, MOST_AMPLIFIED = 100.0, 1e-3

# Samples in the random batch: more than one, so that a mixed-up batch dimension shows.
SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Proof:
    """The largest relative difference that was seen, and the largest that was allowed."""

    difference: float
    allowed: float


@undisturbed
def verify(model: nn.Module, plan: Plan, smaller: nn.Module, example: Any) -> Proof:
    """The proof that the smaller model equals the masked original; `example` is a batch of the model's inputs.

    Both are compared in float64, where a wrong index cannot hide behind rounding; a model whose code insists on its
    own precision is compared in that.

    Raises:
        VerificationError: it crashes, changes the form of the outputs, or computes something else.
    """
    require_kind("plan", plan, Plan, "a recoup.Plan, as recoup.recover makes one")
    require_kind("smaller", smaller, nn.Module, "a torch.nn.Module, as recoup.apply makes one")
    device = device_of(model)
    inputs = random_like(inputs_of(example, model).to(device))
    whole, cut, batch = _in_float64(masked(model, plan).eval(), duplicate(smaller).eval(), inputs)
    with torch.no_grad(), exact_float32():
        expected, actual = outputs(whole, batch), _run(cut, batch)
        try:
            return compare(expected, actual)
        except VerificationError:
            compare_with_itself(expected, outputs(whole, batch), type(model).__name__)
            return compare(expected, actual, own_rounding(whole, batch, expected))


def agree(model: nn.Module, host: nn.Module, inputs: Inputs) -> Proof:
    """The proof that a model's standalone form computes what the model does.

    In the model's own precision: weights that the form stores were computed in it.
    """
    batch = random_like(inputs)
    with torch.no_grad(), exact_float32():
        return compare(outputs(working_copy(model), batch), _run(duplicate(host).eval(), batch))


def random_like(inputs: Inputs) -> Inputs:
    """A batch of the same form: the first sample times random factors, so that what is positive stays positive.

    Noise where that sample is all zeros; the given values for everything that is not a real number.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        is_batched = tensor.dim() > 0 and tensor.shape[0] == 1
        if not tensor.is_floating_point():
            return torch.cat([tensor] * SAMPLES) if is_batched else tensor
        shape = (SAMPLES, *tensor.shape[1:]) if is_batched else tuple(tensor.shape)
        if not bool(tensor.any()):
            return torch.randn(shape, generator=generator).to(tensor)
        return tensor * (0.5 + torch.rand(shape, generator=generator)).to(tensor)

    return inputs.first(1).map(noise)


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All tensors a model returns for a copy of the inputs, whatever they are packed in."""
    return tensors_in(inputs.copy().call(model))


def own_rounding(model: nn.Module, batch: Inputs, expected: list[Tensor]) -> float:
    """How far rounding alone moves the outputs, relative to the largest: inputs are shaken by their last digit.

    A deep network may blow rounding up by many orders. What it does to its own it may do to the smaller one's.
    """
    generator = torch.Generator().manual_seed(1)

    def shaken(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator).to(tensor) - 0.5
        return tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * noise)

    moved = outputs(model, batch.map(shaken))
    pairs = [
        (a.double(), b.double()) for a, b in zip(expected, moved, strict=True) if a.is_floating_point() and a.numel()
    ]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0)


def compare(expected: list[Tensor], actual: list[Tensor], rounding: float = 0.0) -> Proof:
    """The largest relative difference; raises where it is more than rounding, the network's own `rounding` included."""
    if [t.shape for t in expected] != [t.shape for t in actual]:
        raise VerificationError(
            f"the smaller model returns shapes {[tuple(t.shape) for t in actual]} where the original returns "
            f"{[tuple(t.shape) for t in expected]}; it is not returned. Please report the model."
        )
    worst = Proof(0.0, 0.0)
    for a, b in zip(expected, actual, strict=True):
        if not a.is_floating_point():
            continue
        allowed = max(TOLERANCE.get(a.dtype, COARSE), min(AMPLIFIED * rounding, MOST_AMPLIFIED))
        scale = float(a.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)) if a.numel() else 1.0
        difference = float((a.double() - b.double()).abs().max()) / scale if a.numel() else 0.0
        if not difference <= allowed:
            raise VerificationError(
                f"the smaller model differs from the masked original by {difference:.1e} of the largest output "
                f"(allowed: {allowed:.0e}); it is not returned. Something in the forward code depends on channel "
                "numbers in a way that was not seen; please report the model."
            )
        worst = max(worst, Proof(difference, allowed), key=lambda proof: (proof.difference, proof.allowed))
    return worst


def compare_with_itself(first: list[Tensor], second: list[Tensor], name: str) -> None:
    """Refuse a model that gives other outputs the second time."""
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
        raise VerificationError(
            f"{name} gives other outputs for the same inputs even in eval mode; it is not returned. Switch off what is "
            "random in its forward pass, such as dropout that is always on."
        )


def _in_float64(whole: nn.Module, cut: nn.Module, batch: Inputs) -> tuple[nn.Module, nn.Module, Inputs]:
    """All three in float64 if the model's code allows it, otherwise as they are."""
    precise = batch.map(_double)
    try:
        with torch.no_grad():
            outputs(duplicate(whole).double(), precise)
    except Exception:  # user code that fixes a dtype
        return whole, cut, batch
    return whole.double(), cut.double(), precise


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    try:
        return outputs(model, inputs)
    except Exception as error:  # user code with sizes written into it
        raise VerificationError(
            f"the smaller {type(model).__name__} crashes ({type(error).__name__}: {str(error)[:200]}); it is not "
            "returned. A size is written into its forward code: compute it from the tensors instead."
        ) from error
