"""Batches in the forms people have them, turned into what a model is called with.

A batch is a tensor; a pair (inputs, labels); a tuple of inputs when the model's `forward` requires several; or a dict
of keyword inputs. In a pair, `inputs` may itself be a tuple or a dict. A dict may hold `labels` among its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from recoup.errors import (
    CalibrationError,
    InputError,
    RecoupError,
    told,
)
from recoup.inputs.labels import class_numbers, is_labelled_pair, labels_in, required_inputs, without_labels
from recoup.inputs.models import require_model
from recoup.inputs.surroundings import as_the_caller

READ_ONCE = (
    "{} is an iterator that can be read only once, and batch norms are estimated on it a second time. Pass a list or "
    "a DataLoader."
)


# What a result is made of; numbers that stand for sizes have fields, which lead far into torch.
LEAVES = (Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Positional and keyword arguments of one call of the model, and class numbers (samples,) that came with them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    labels: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in lists and dicts too."""
        return tensors_in([*self.args, *self.kwargs.values()])

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same call with every tensor changed."""
        args, kwargs = _changed([*self.args], change), _changed(dict(self.kwargs), change)
        return Inputs(tuple(args), kwargs, self.labels)

    def to(self, device: torch.device) -> Inputs:
        """The same call with copies of its tensors on `device`: a model may write into what it is given."""
        return self.map(lambda tensor: tensor.to(device, copy=True))

    def copy(self) -> Inputs:
        """The same call with copies of its tensors."""
        return self.map(Tensor.clone)

    @property
    def size(self) -> int:
        """Number of samples: the first dimension of the first tensor that has one."""
        return next((tensor.shape[0] for tensor in self.tensors() if tensor.dim()), 1)

    def first(self, count: int) -> Inputs:
        """The first `count` samples."""
        return self._part(slice(count))

    def pick(self, samples: Tensor) -> Inputs:
        """Only these samples: a mask over all of them (bool), or their places."""
        return self._part(samples)

    def _part(self, samples: Tensor | slice) -> Inputs:
        size = self.size

        def cut(tensor: Tensor) -> Tensor:
            return tensor[samples if isinstance(samples, slice) else samples.to(tensor.device)]

        part = self.map(lambda tensor: cut(tensor) if tensor.dim() and tensor.shape[0] == size else tensor)
        return part if self.labels is None else replace(part, labels=cut(self.labels))

    def call(self, model: nn.Module) -> Any:
        """What the model returns for this call."""
        with as_the_caller():
            return model(*self.args, **self.kwargs)

    def shapes(self) -> str:
        """For messages: the shapes of the tensors."""
        return ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors())

    def sample_shapes(self) -> str:
        """The same without the number of samples, of which only a part may be in this call."""
        size, shapes = self.size, [tuple(tensor.shape) for tensor in self.tensors()]
        return ", ".join(str(shape[1:] if shape[:1] == (size,) else shape) for shape in shapes)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are, and so where its inputs must be."""
    require_model(model)
    return next(iter(model.parameters())).device


def inputs_of(batch: Any, model: nn.Module) -> Inputs:
    """The call a batch stands for; labels are no part of it, and kept beside it where they are class numbers.

    Raises:
        CalibrationError: it is of no known form, has no samples, or holds tensors that nothing can be computed of.
    """
    if isinstance(batch, Inputs):
        return batch
    inputs = _call_of(batch, model).map(_plain)
    sizes = [tensor.shape[0] for tensor in inputs.tensors() if tensor.dim()]
    if not sizes:
        held = "only single numbers" if inputs.tensors() else "no tensor"
        raise CalibrationError(
            f"a batch holds {held}, so it has no dimension for samples. Give tensors whose first dimension counts the "
            "samples, as x[None] does for one."
        )
    if not inputs.size:
        raise CalibrationError(f"a batch of shape {inputs.shapes()} holds no samples. Leave empty batches out.")
    return replace(inputs, labels=class_numbers(labels_in(batch, model), inputs.size))


def numbered_inputs(batch: Any, model: nn.Module, number: object, what: str = "calibration") -> Inputs:
    """The call a batch stands for, with its number in the error if there is none."""
    try:
        return inputs_of(batch, model)
    except CalibrationError as error:
        raise CalibrationError(f"{what} batch {number}: {error}") from error


def require_alike(first: Inputs, inputs: Inputs, number: object) -> None:
    """Refuse a calibration batch whose arguments are others than the first one's, or of other dtypes or ranks."""
    ours, theirs = (
        tree_flatten((part.args, {name: part.kwargs[name] for name in sorted(part.kwargs)})) for part in (first, inputs)
    )
    if ours[1] != theirs[1]:
        raise CalibrationError(
            f"calibration batch {number} calls the model with {_arguments(inputs)}, the first one with "
            f"{_arguments(first)}. Every batch must have the form of the first one."
        )
    for a, b in zip(ours[0], theirs[0], strict=True):
        if _kind(a) != _kind(b):
            raise CalibrationError(
                f"calibration batch {number} holds {_kind(b)} where the first one holds {_kind(a)}. Every batch must "
                "have the form of the first one."
            )


def _arguments(inputs: Inputs) -> str:
    """For messages: how a model is called."""
    names = ", ".join(map(str, inputs.kwargs))
    return f"{len(inputs.args)} positional inputs" + (f" and {names}" if names else "")


def _kind(value: Any) -> str:
    return f"a {value.dtype} tensor of {value.dim()} dims" if isinstance(value, Tensor) else type(value).__name__


def _call_of(batch: Any, model: nn.Module) -> Inputs:
    if isinstance(batch, Tensor):
        return Inputs((batch,), {})
    if isinstance(batch, Mapping):
        return Inputs((), without_labels(batch, model))
    if not isinstance(batch, (tuple, list)) or not batch:
        raise _unknown_form(batch, model)
    if not is_labelled_pair(batch, model):
        return Inputs(tuple(batch) if required_inputs(model) > 1 else (batch[0],), {})
    inputs = batch[0]
    if isinstance(inputs, (Tensor, Mapping)):
        return _call_of(inputs, model)
    if not isinstance(inputs, (tuple, list)):
        raise _unknown_form(inputs, model)
    return Inputs(tuple(inputs), {})


def _unknown_form(batch: Any, model: nn.Module) -> CalibrationError:
    return CalibrationError(
        f"a batch of type {type(batch).__name__} cannot be fed to {type(model).__name__}. Give a tensor, an "
        "(inputs, labels) pair, a tuple of inputs for a model that takes several, or a dict of keyword inputs."
    )


def _plain(tensor: Tensor) -> Tensor:
    """A tensor without the class it may have of its own, such as torchvision's images have; dense, with values."""
    with torch._C.DisableTorchFunctionSubclass():
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise CalibrationError(f"a batch holds a {type(tensor).__name__}, which is no ordinary tensor. Give one.")
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").removeprefix("_")
            raise CalibrationError(f"a batch holds a {kind} tensor. Make it dense, as x.to_dense() does.")
        if tensor.is_meta:
            raise CalibrationError("a batch holds a tensor on the meta device, which has no values. Give real ones.")
        if tensor.is_quantized:
            raise CalibrationError("a batch holds a quantised tensor. Give x.dequantize().")
        return tensor if type(tensor) is Tensor else tensor.detach().as_subclass(Tensor)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a model's result: in tuples, dicts, and the fields of objects."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor)]


def leaves_in(value: Any) -> list[Any]:
    """Everything in a model's result, in order: tensors, numbers, None; in tuples, dicts, and the fields of objects."""
    return list(_leaves_in(value, ()))


def _leaves_in(value: Any, above: tuple[Any, ...]) -> Iterator[Any]:
    """What is in a value that lies in those `above`; one that leads back to them is left there."""
    if value is None or isinstance(value, LEAVES):
        yield value
    elif not any(value is outer for outer in above):
        parts = value if isinstance(value, (list, tuple)) else _fields_of(value).values()
        for part in parts:
            yield from _leaves_in(part, (*above, value))


def _fields_of(value: Any) -> Mapping[Any, Any]:
    fields: Mapping[Any, Any] = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return fields


class Stream:
    """Batches to be read once, the `first` of which is known beforehand; `length` is None where nobody knows it.

    Raises:
        CalibrationError: there is no batch at all.
    """

    def __init__(self, batches: Iterable[Any], what: str = "calibration") -> None:
        _check_iterable(batches, what)
        self.length = length_of(batches)
        self._batches, self._what, self._is_read = batches, what, False
        self._rest: Iterator[Any] = self._read(lambda: iter(batches), 1)
        self.first = self._next(1)
        if self.first is _NOTHING:
            raise CalibrationError(
                f"{what} gave no batch. It is empty, or an iterator that was read to its end before: pass a list, a "
                "DataLoader or a fresh generator."
            )

    def __iter__(self) -> Iterator[Any]:
        if self._is_read:
            raise CalibrationError(
                f"the {self._what} batches were read before, and only the first of them is left. Make a new split."
            )
        self._is_read = True
        batch, number = self.first, 1
        while batch is not _NOTHING:
            yield batch
            number += 1
            batch = self._next(number)

    def again(self) -> Stream:
        """The same batches from the start."""
        self.require_repeatable()
        return Stream(self._batches, self._what)

    def require_repeatable(self) -> None:
        """Refuse batches that cannot be read from the start again.

        Raises:
            CalibrationError: they are an iterator.
        """
        if isinstance(self._batches, Iterator):
            raise CalibrationError(READ_ONCE.format(self._what))

    def _next(self, number: int) -> Any:
        return self._read(lambda: next(self._rest, _NOTHING), number)

    def _read(self, step: Callable[[], Any], number: int) -> Any:
        """What the caller's data gives, in the modes it counts on."""
        try:
            with as_the_caller():
                return step()
        except RecoupError:
            raise
        except Exception as error:  # user code
            raise CalibrationError(
                f"{self._what} batch {number} could not be read ({told(error)}). Repair the data, or leave that batch "
                "out."
            ) from error


def length_of(batches: Iterable[Any]) -> int | None:
    """Number of batches where it is known."""
    try:
        return len(batches)  # type: ignore[arg-type]  # asking is the way to know
    except Exception:  # no length, or user code that fails on it
        return None


def call_checked(model: Callable[..., Any], inputs: Inputs, number: object, what: str = "calibration") -> Any:
    """What the model returns for a copy of the inputs, with an error that names the batch where it fails."""
    own = inputs.copy()
    try:
        with as_the_caller():
            return model(*own.args, **own.kwargs)
    except (CalibrationError, InputError) as error:
        raise CalibrationError(f"{what} batch {number}: {error}") from error
    except Exception as error:  # user code
        sizes = {tensor.shape[0] for tensor in inputs.tensors() if tensor.dim()}
        hint = "Every batch must have the form of the first one."
        if len(sizes) > 1:
            hint = f"Its tensors, {inputs.shapes()}, differ in their first dimension: is it the samples in all of them?"
        raise CalibrationError(
            f"{what} batch {number} with samples of shape {inputs.sample_shapes()} makes the model fail "
            f"({told(error)}). {hint}"
        ) from error


def check_finite(inputs: Inputs, number: object) -> None:
    """Refuse a calibration batch with values that are not finite."""
    for tensor in inputs.tensors():
        has_fractions = tensor.is_floating_point() or tensor.is_complex()
        if has_fractions and not bool(tensor.isfinite().all()):
            is_mask = not bool(tensor.isnan().any()) and bool((tensor[~tensor.isfinite()] < 0).all())
            hint = (
                "holds -inf, as a mask does that is added to scores. Pass a mask of booleans, or torch.finfo(dtype).min"
                if is_mask
                else "holds NaN or infinite inputs. Remove or repair it"
            )
            raise CalibrationError(f"calibration batch {number} {hint}.")


def require_repeatable(batches: Iterable[Any], what: str) -> None:
    """Refuse a one-shot iterator where the data is read more than once."""
    _check_iterable(batches, what)
    if isinstance(batches, Iterator):
        raise CalibrationError(
            f"{what} is an iterator that can be read only once, but it is read for every candidate. Pass a list or "
            "a DataLoader."
        )


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its lists, tuples and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(part, change) for part in value)
    return value


def _check_iterable(batches: Any, what: str) -> None:
    single = isinstance(batches, (Tensor, Mapping, str, bytes, type))
    if single or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise CalibrationError(
            f"{what} must be an iterable of batches, got one {type(batches).__name__}. Wrap a single batch in a list: "
            "[batch]."
        )


_NOTHING = object()
