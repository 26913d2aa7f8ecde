"""The proof that the smaller model computes what the masked original computes, on real and on random samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import InputError, VerificationError, require_kind
from recoup.graph.capture import Captured
from recoup.graph.copies import duplicate, working_copy
from recoup.graph.modes import exact_float32
from recoup.graph.settings import without_cache
from recoup.graph.standalone import Standalone, entering
from recoup.inputs.batches import Inputs, device_of, inputs_of, leaves_in
from recoup.inputs.samples import SampledCall, sampled_call
from recoup.inputs.surroundings import undisturbed
from recoup.plan import Plan
from recoup.surgery.apply import masked, without_rounding
from recoup.surgery.comparison import Proof, compare, worse

# Samples in a random batch and in one of real ones: more than one, so that a mixed-up batch dimension shows.
SAMPLES = (2, 3)
# By how much random inputs are made longer and wider, to see whether sizes are followed.
STRETCH = 1.5


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
    inputs = inputs_of(example, model).to(device)

    def pair() -> _Pair:
        whole, cut = (without_cache(twin).eval() for twin in (masked(model, plan), duplicate(smaller)))
        both = _Pair(whole, cut).in_float64(inputs.first(1))
        without_rounding(both.whole, plan, smaller)
        return both

    batches = _served(smaller, _batches(inputs))
    if plan.graph is not None:
        batches += _of_other_sizes(batches[0], pair().whole)
    return _compare_all(pair, batches, type(model).__name__)


def agree(model: nn.Module, host: nn.Module, example: Any) -> Proof:
    """The proof that a model's standalone form computes what the model does, or refuses the call.

    In the model's own precision: weights that the form stores were computed in it.
    """
    inputs = inputs_of(example, model).to(device_of(model))

    def pair() -> _Pair:
        return _Pair(working_copy(model), duplicate(host).eval())

    return _compare_all(pair, _served(host, _batches(inputs)), type(model).__name__)


def follows(model: nn.Module, host: nn.Module, samples: SampledCall) -> bool:
    """Whether a standalone form, where its model runs at other sizes, gives the same there or refuses the call."""
    batches = _of_other_sizes(random_like(samples), working_copy(model))
    return not batches or _same_or_refused(model, host, batches)


def agrees(model: nn.Module, host: nn.Module, sample: Inputs) -> bool:
    """Whether a standalone form gives what its model gives for a call; what is no number tells nothing."""
    with torch.no_grad():
        returned = leaves_in(sample.copy().call(working_copy(model)))
    if any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in returned):
        return True
    try:
        _compare_all(lambda: _Pair(working_copy(model), duplicate(host).eval()), [sample], type(model).__name__)
    except VerificationError:
        return False
    return True


def _same_or_refused(model: nn.Module, host: nn.Module, batches: list[Inputs]) -> bool:
    try:
        _compare_all(lambda: _Pair(working_copy(model), duplicate(host).eval()), batches, type(model).__name__)
    except VerificationError as error:
        return isinstance(error.__cause__, InputError)
    return True


def require_real_outputs(captured: Captured) -> None:
    """Refuse a model that returns choices only: whatever it computes, next to nothing of it could be compared."""
    returned = next(node for node in captured.graph.nodes if node.op == "output").all_input_nodes
    values = [node.meta.get("val") for node in returned]
    if not any(isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) for value in values):
        raise VerificationError(
            "the model returns no real numbers, so nothing could be compared with the original. Have it return its "
            "scores, not classes or choices made from them."
        )


def random_like(samples: SampledCall) -> Inputs:
    """A batch of the same form: the first sample times random factors, so that what is positive stays positive.

    Noise where that sample is all zeros; the given values for everything that is not a real number.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if not bool(tensor.any()):
            return torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor * (0.5 + torch.rand(tensor.shape, generator=generator)).to(tensor)

    return samples.times(SAMPLES[0]).map(noise)


def outputs(model: nn.Module, inputs: Inputs) -> list[Any]:
    """All that a model returns for a copy of the inputs, whatever it is packed in."""
    return leaves_in(inputs.copy().call(model))


class _Pair:
    """What is expected of a model, and the model; each call may change what they hold, so both see the same calls."""

    def __init__(self, whole: nn.Module, cut: nn.Module, change: Callable[[Tensor], Tensor] | None = None) -> None:
        self.whole, self.cut, self._change = whole, cut, change

    def in_float64(self, batch: Inputs) -> _Pair:
        """Both in float64 if the model's code allows it, otherwise as they are."""
        try:
            with torch.no_grad():
                outputs(duplicate(self.whole).double(), batch.map(_double))
        except Exception:  # user code that fixes a dtype
            return self
        return _Pair(self.whole.double(), self.cut.double(), _double)

    def run(self, batch: Inputs) -> tuple[list[Any], list[Any]]:
        batch = self.changed(batch)
        try:
            expected = outputs(self.whole, batch)
        except Exception as error:  # user code
            raise VerificationError(
                f"the original fails on inputs of shape {batch.shapes()} ({type(error).__name__}: {str(error)[:200]}). "
                "Pass a batch that it takes."
            ) from error
        return expected, _run(self.cut, batch)

    def changed(self, batch: Inputs) -> Inputs:
        return batch if self._change is None else batch.map(self._change)


def _compare_all(make: Callable[[], _Pair], batches: list[Inputs], name: str) -> Proof:
    """The worst of the comparisons on all batches."""
    proofs = []
    with torch.no_grad(), exact_float32():
        pair = make()
        for batch in batches:
            expected, actual = pair.run(batch)
            try:
                proofs.append(compare(expected, actual))
            except VerificationError:
                proofs.append(_compare_again(make, batch, name))
    return functools.reduce(worse, proofs)


def _compare_again(make: Callable[[], _Pair], batch: Inputs, name: str) -> Proof:
    """A second look at a batch, which knows what rounding alone does to the outputs; from fresh copies."""
    pair, other, third = make(), make(), make()
    expected, actual = pair.run(batch)
    _check_repeats(expected, outputs(other.whole, other.changed(batch)), name)
    return compare(expected, actual, outputs(third.whole, third.changed(batch).map(_shaken())))


def _check_repeats(first: list[Any], second: list[Any], name: str) -> None:
    """Refuse a model that gives other outputs the second time."""
    pairs = zip(first, second, strict=True)
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs if isinstance(a, Tensor)):
        raise VerificationError(
            f"{name} gives other outputs for the same inputs even in eval mode; it is not returned. Switch off what is "
            "random in its forward pass, such as dropout that is always on."
        )


def _batches(inputs: Inputs) -> Iterator[Inputs]:
    """Random samples, real ones, and a single one."""
    yield random_like(sampled_call(inputs))
    if inputs.size > 1:
        yield inputs.first(SAMPLES[1])
    yield inputs.first(1)


def _served(module: nn.Module, batches: Iterable[Inputs]) -> list[Inputs]:
    """The batches without those that a standalone form refuses, as a single sample where code treats it otherwise."""
    whole = list(batches)
    return [batch for batch in whole if not _refuses(module, batch)] or whole


def _refuses(module: nn.Module, batch: Inputs) -> bool:
    try:
        if isinstance(module, Standalone):
            entering(module, batch.args, batch.kwargs)
    except InputError:
        return True
    return False


def _of_other_sizes(batch: Inputs, model: nn.Module) -> list[Inputs]:
    """The batch made longer along every dim but the first and the channels', if the model takes that; else none.

    A part of it comes once more. Where two-dimensional inputs are no tokens, only the others are made longer.
    """

    def stretched(tensor: Tensor, first: int) -> Tensor:
        for dim in range(first, tensor.dim()):
            more = int(tensor.shape[dim] * (STRETCH - 1))
            tensor = torch.cat([tensor, tensor.narrow(dim, 0, more)], dim)
        return tensor

    both = batch.map(lambda tensor: stretched(tensor, min(2, tensor.dim() - 1) if tensor.dim() > 1 else 1))
    spatial = batch.map(lambda tensor: stretched(tensor, 2))
    return [other for other in (both, spatial) if _runs(model, other)][:1]


def _runs(model: nn.Module, batch: Inputs) -> bool:
    try:
        with torch.no_grad():
            batch.copy().call(model)
    except Exception:  # user code that takes one size only, or our own refusal
        return False
    return True


def _shaken() -> Callable[[Tensor], Tensor]:
    """Moves real numbers by their last digit.

    A deep network may blow rounding up by many orders. What it does to its own it may do to the smaller one's.
    """
    generator = torch.Generator().manual_seed(1)

    def shaken(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator).to(tensor) - 0.5
        return tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * noise)

    return shaken


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _run(model: nn.Module, inputs: Inputs) -> list[Any]:
    try:
        return outputs(model, inputs)
    except Exception as error:  # user code with sizes written into it
        raise VerificationError(
            f"the smaller {type(model).__name__} crashes ({type(error).__name__}: {str(error)[:200]}); it is not "
            "returned. A size is written into its forward code: compute it from the tensors instead."
        ) from error
