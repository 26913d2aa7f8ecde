"""The calibration images that later stages come back to, a part of them held out of every fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from recoup.errors import CalibrationError, require_kind
from recoup.inputs.batches import (
    Inputs,
    Stream,
    check_finite,
    device_of,
    inputs_of,
    numbered_inputs,
    require_alike,
    tensors_in,
)
from recoup.inputs.resources import free_on, readable
from recoup.inputs.surroundings import undisturbed

Serves = Callable[[Inputs], bool]

# One image in five is held out, to judge the fits by.
HELD_OUT = 5
# How much of itself a blended image keeps; the rest is another image. Networks know the images they were trained on by
# heart, and their answers hardly change there; between two images they behave as on new ones (docs/lab/tried.md).
OWN_SHARE = 0.8
# Bytes of inputs in a batch: large enough to keep a GPU busy, small enough for the caches of a CPU.
BATCH_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
# The share of the free memory that calibration images may take, and how many samples are read where they are not kept
# and nobody knows their number.
MEMORY_SHARE = 0.5
MOST_STREAMED = 1_000_000
ENDLESS = (
    "A few thousand are enough. If the batches have no end, take some of them: list(itertools.islice(batches, 20))."
)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Calibration batches: those at the places `fit` are fitted to, those at `held` judge the fits.

    `numbers` says which of the caller's batches each is made of; `first` is the first of these. Where nothing is held
    out, the caller's own batches are passed on as they come, once: `stream` has them, and there are no others.
    """

    batches: tuple[Inputs, ...]
    numbers: tuple[str, ...]
    fit: tuple[int, ...]
    held: tuple[int, ...]
    device: torch.device
    first: Inputs
    stream: Stream | None = None

    @property
    def size(self) -> int:
        """Number of images that are kept."""
        return sum(batch.size for batch in self.batches)

    def fitting(self) -> Iterator[tuple[object, Any]]:
        """The batches to fit to, each with the number that messages call it by."""
        if self.stream is not None:
            yield from _bounded(self.stream)
        yield from ((self.numbers[place], self.batches[place]) for place in self.fit)

    def repeated(self) -> Iterator[tuple[object, Any]]:
        """The batches to fit to once more, after `fitting` has read them.

        Raises:
            CalibrationError: they came from an iterator, and were not kept.
        """
        if self.stream is not None:
            yield from _bounded(self.stream.again())
        yield from ((self.numbers[place], self.batches[place]) for place in self.fit)

    def part(self, images: int) -> Split:
        """The first batches with at least so many images between them."""
        counts = [sum(batch.size for batch in self.batches[: place + 1]) for place in range(len(self.batches))]
        end = next((place for place in self.held if counts[place] >= images), len(self.batches) - 1) + 1
        fit, held = (tuple(place for place in places if place < end) for places in (self.fit, self.held))
        return Split(self.batches[:end], self.numbers[:end], fit, held, self.device, self.first)

    def held_out(self) -> list[Inputs]:
        """Held-out images, each blended with another one: of the next batch where it is alone in its own."""
        held = [self.batches[place] for place in self.held]
        pairs = zip(held, [*held[1:], *held[:1]], strict=True)
        return [_blended_with(batch, following).to(self.device) for batch, following in pairs]


@undisturbed
def split(
    model: nn.Module, calibration: Iterable[Any], *, held_out: bool = True, serves: Serves | None = None
) -> Split:
    """All calibration batches, put together to a size that suits the device, every fifth image held out.

    A method that judges nothing, such as the paper's, needs no held-out images: with `held_out=False` batches are
    neither kept nor changed. `serves`, such as that of a `Traced`, says of the form of a batch whether the graph takes
    it: batches are not put together to one that it would not take.

    Raises:
        CalibrationError: there are too few images to hold some out.
    """
    device = device_of(model)
    require_kind("held_out", held_out, bool, "True or False")
    stream = calibration if isinstance(calibration, Stream) else Stream(calibration)
    first = inputs_of(stream.first, model)
    if not held_out:
        return Split((), (), (), (), device, first, stream)
    given = _within_memory(
        _checked(numbered_inputs(batch, model, number), number, first) for number, batch in enumerate(stream, start=1)
    )
    parts: list[Inputs] = []
    numbers: list[str] = []
    held: list[int] = []
    count = 0
    for number, inputs in _regrouped(given, BATCH_BYTES.get(device.type, BATCH_BYTES["cpu"]), serves):
        judging = torch.arange(count, count + inputs.size) % HELD_OUT == HELD_OUT - 1
        count += inputs.size
        if not bool(judging.all()):
            parts.append(inputs.pick(~judging))
        if bool(judging.any()):
            held.append(len(parts))
            parts.append(inputs.pick(judging))
        numbers += [number] * (len(parts) - len(numbers))
    held = held or ([len(parts) - 1] if len(parts) > 1 else [])
    if not held:
        raise CalibrationError(
            f"{sum(part.size for part in parts)} calibration images are too few: a fifth of them is held out to judge "
            "the fits by. Give a few hundred, or use method='paper', which fits in one pass."
        )
    fit = tuple(place for place in range(len(parts)) if place not in set(held))
    return Split(tuple(parts), tuple(numbers), fit, tuple(held), device, first)


def joined(batches: Iterable[Inputs], device: torch.device) -> Iterator[tuple[str, Inputs]]:
    """The same samples in batches of a size that suits the device, with the numbers of the batches in each.

    However the caller has cut them, none is of a single sample if there are others to put beside it.
    """
    waiting: list[tuple[str, Inputs]] = []
    for numbered in _regrouped(batches, BATCH_BYTES.get(device.type, BATCH_BYTES["cpu"])):
        waiting.append(numbered)
        if numbered[1].size > 1 and len(waiting) > 1:
            yield waiting.pop(0)
    if len(waiting) == 2 and _fit_together(waiting[0][1], waiting[1][1]):
        (first, before), (last, after) = waiting
        waiting = [(f"{first.split()[0]} to {last}", _joined([before, after]))]
    yield from waiting


def _within_memory(batches: Iterable[Inputs]) -> Iterator[Inputs]:
    """The same batches, all of which will be held; refused where they would fill the memory, as endless ones do."""
    room: dict[torch.device, int] = {}
    taken: dict[torch.device, int] = {}
    samples = 0
    for number, inputs in enumerate(batches, start=1):
        samples += inputs.size
        for tensor in inputs.tensors():
            place = tensor.device
            room.setdefault(place, int(MEMORY_SHARE * free_on(place)))
            taken[place] = taken.get(place, 0) + tensor.numel() * tensor.element_size()
            if taken[place] > room[place]:
                raise CalibrationError(
                    f"{number:,} calibration batches with {samples:,} samples were taken, and there is no memory for "
                    f"more: they have {readable(taken[place])}, and {readable(room[place])} may be used. {ENDLESS}"
                )
        yield inputs


def _bounded(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Batches that are read and not kept, with their numbers; of those that nobody knows the number of, not all."""
    samples = 0
    for number, batch in enumerate(stream, start=1):
        with torch._C.DisableTorchFunctionSubclass():  # a tensor of a class of its own may refuse
            samples += next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), 1)
        if stream.length is None and samples > MOST_STREAMED:
            raise CalibrationError(
                f"{number:,} calibration batches with {samples:,} samples were taken, and there are more. {ENDLESS}"
            )
        yield number, batch


def _checked(inputs: Inputs, number: int, first: Inputs) -> Inputs:
    require_alike(first, inputs, number)
    check_finite(inputs, number)
    return inputs


def _regrouped(batches: Iterable[Inputs], limit: int, serves: Serves | None = None) -> Iterator[tuple[str, Inputs]]:
    """The same samples in batches of up to `limit` bytes, or as they came where they are larger or of other shapes.

    They come as they were, too, where `serves` refuses what they would make. With each come the numbers of the batches
    in it.
    """
    waiting: list[Inputs] = []
    first = 1
    for number, inputs in enumerate(batches, start=1):
        if waiting and not _may_join([*waiting, inputs], limit, serves):
            yield _numbers(first, len(waiting)), _joined(waiting)
            waiting, first = [], number
        waiting.append(inputs)
    if waiting:
        yield _numbers(first, len(waiting)), _joined(waiting)


def _may_join(parts: list[Inputs], limit: int, serves: Serves | None) -> bool:
    """Whether the last of `parts`, which come in this order, may be put to the others."""
    if not _fit_together(parts[-2], parts[-1]) or _bytes(parts) > limit:
        return False
    return serves is None or serves(_form_of(parts))


def _form_of(parts: list[Inputs]) -> Inputs:
    """A batch of the form that `parts` have together, without values."""
    size = sum(part.size for part in parts)
    return parts[0].map(lambda tensor: tensor.new_empty((size, *tensor.shape[1:]), device="meta"))


def _numbers(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _bytes(parts: list[Inputs]) -> int:
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.tensors())


def _fit_together(left: Inputs, right: Inputs) -> bool:
    """Whether every tensor has a batch dim and the rest of its shape in common with its counterpart."""
    ours, theirs = (tree_flatten((part.args, dict(part.kwargs))) for part in (left, right))
    if ours[1] != theirs[1]:
        return False
    sizes = left.size, right.size
    return all(_match(a, b, *sizes) for a, b in zip(ours[0], theirs[0], strict=True))


def _match(a: Any, b: Any, left: int, right: int) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)
    return bool(a.dim() and b.dim()) and len(a) == left and len(b) == right and a.shape[1:] == b.shape[1:]


def _joined(parts: list[Inputs]) -> Inputs:
    if len(parts) == 1:
        return parts[0]
    columns = iter(list(zip(*(part.tensors() for part in parts), strict=True)))
    labels = [part.labels for part in parts if part.labels is not None]
    joined = parts[0].map(lambda _: torch.cat(next(columns)))
    return replace(joined, labels=torch.cat(labels) if len(labels) == len(parts) else None)


def _blended_with(inputs: Inputs, other: Inputs) -> Inputs:
    if inputs.size > 1 or not _fit_together(inputs, other.first(1)):
        return blended(inputs)
    return blended(_joined([inputs, other.first(1)])).first(1)


def blended(inputs: Inputs) -> Inputs:
    """Every sample mixed with its neighbour; what is not real-valued stays as it is."""
    size = inputs.size

    def mixed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim() or tensor.shape[0] != size:
            return tensor
        return OWN_SHARE * tensor + (1 - OWN_SHARE) * tensor.roll(1, dims=0)

    return inputs.map(mixed)
