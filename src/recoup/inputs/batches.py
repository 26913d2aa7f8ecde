"""Batches in the forms people have them, turned into what a model is called with.

A batch is a tensor; a pair (inputs, labels); a tuple of inputs when the model's `forward` requires several; or a dict
of keyword inputs. In a pair, `inputs` may itself be a tuple or a dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import CalibrationError, CaptureError, InputError


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Positional and keyword arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in lists and dicts too."""
        return tensors_in([*self.args, *self.kwargs.values()])

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same call with every tensor changed."""
        args, kwargs = _changed([*self.args], change), _changed(dict(self.kwargs), change)
        return Inputs(tuple(args), kwargs)

    def to(self, device: torch.device) -> Inputs:
        """The same call with copies of its tensors on `device`: a model may write into what it is given."""
        return self.map(lambda tensor: tensor.to(device, copy=True))

    def copy(self) -> Inputs:
        """The same call with copies of its tensors."""
        return self.map(Tensor.clone)

    @property
    def size(self) -> int:
        """Number of samples: the common first dimension of the tensors."""
        return self.tensors()[0].shape[0] if self.tensors() and self.tensors()[0].dim() else 1

    def first(self, count: int) -> Inputs:
        """The first `count` samples."""
        size = self.size
        return self.map(lambda tensor: tensor[:count] if tensor.dim() and tensor.shape[0] == size else tensor)

    def pick(self, samples: Tensor) -> Inputs:
        """Only these samples: a mask over all of them (bool), or their places."""
        size = self.size
        return self.map(
            lambda tensor: tensor[samples.to(tensor.device)] if tensor.dim() and tensor.shape[0] == size else tensor
        )

    def call(self, model: nn.Module) -> Any:
        """What the model returns for this call."""
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
    first = next(iter(model.parameters()), None)
    if first is None:
        raise CaptureError(f"{type(model).__name__} has no parameters, so there is nothing to prune or measure in it.")
    return first.device


def inputs_of(batch: Any, model: nn.Module) -> Inputs:
    """The call a batch stands for; labels are left out."""
    if isinstance(batch, Inputs):
        return batch
    if isinstance(batch, Tensor):
        return Inputs((batch,), {})
    if isinstance(batch, Mapping):
        return Inputs((), dict(batch))
    if not isinstance(batch, (tuple, list)) or not batch:
        raise CalibrationError(
            f"a batch of type {type(batch).__name__} cannot be fed to {type(model).__name__}. Give a tensor, an "
            "(inputs, labels) pair, a tuple of inputs for a model that takes several, or a dict of keyword inputs."
        )
    if is_labelled_pair(batch, model):
        return inputs_of(batch[0], model) if isinstance(batch[0], (Tensor, Mapping)) else Inputs(tuple(batch[0]), {})
    return Inputs(tuple(batch) if required_inputs(model) > 1 else (batch[0],), {})


def is_labelled_pair(batch: Any, model: nn.Module) -> bool:
    """Whether a batch carries labels beside its inputs."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return False
    return required_inputs(model) <= 1 or isinstance(batch[0], (tuple, list, Mapping))


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


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a model's result: in tuples, dicts, and the fields of objects."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [tensor for part in getattr(value, "__dict__", {}).values() for tensor in tensors_in(part)]


class Stream:
    """Batches to be read once, the `first` of which is known beforehand; `length` is None where nobody knows it.

    Raises:
        CalibrationError: there is no batch at all.
    """

    def __init__(self, batches: Iterable[Any], what: str = "calibration") -> None:
        _check_iterable(batches, what)
        self.length = length_of(batches)
        self._what, self._is_read = what, False
        self._rest = iter(batches)
        self.first = next(self._rest, _NOTHING)
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
        yield self.first
        yield from self._rest


def length_of(batches: Iterable[Any]) -> int | None:
    """Number of batches where it is known."""
    try:
        return len(batches)  # type: ignore[arg-type]  # asking is the way to know
    except TypeError:
        return None


def call_checked(model: Callable[..., Any], inputs: Inputs, number: object) -> Any:
    """What the model returns for a copy of the inputs, with an error that names the batch where it fails."""
    own = inputs.copy()
    try:
        return model(*own.args, **own.kwargs)
    except (CalibrationError, InputError) as error:
        raise CalibrationError(f"calibration batch {number}: {error}") from error
    except Exception as error:  # user code
        raise CalibrationError(
            f"calibration batch {number} with samples of shape {inputs.sample_shapes()} makes the model fail "
            f"({type(error).__name__}: {str(error)[:200]}). Every batch must have the form of the first one."
        ) from error


def check_finite(inputs: Inputs, number: object) -> None:
    """Refuse a calibration batch with values that are not finite."""
    for tensor in inputs.tensors():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CalibrationError(f"calibration batch {number} holds NaN or infinite inputs. Remove or repair it.")


def require_repeatable(batches: Iterable[Any], what: str) -> None:
    """Refuse a one-shot iterator where the data is read more than once."""
    _check_iterable(batches, what)
    if iter(batches) is batches:
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
    single = isinstance(batches, (Tensor, Mapping))
    if single or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise CalibrationError(
            f"{what} must be an iterable of batches, got one {type(batches).__name__}. Wrap a single batch in a list: "
            "[batch]."
        )


_NOTHING = object()
