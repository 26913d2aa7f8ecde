"""From texts on the command line to a device, a network on it and the input it expects."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from recoup.cli.input_spec import CIFAR, IMAGENET, InputSpec, unnormalised
from recoup.cli.models import OpenModel, open_model
from recoup.errors import UsageError


@dataclass(frozen=True, slots=True)
class Network:
    """How to open a network: its name, weights, input and place, as they were given."""

    spec: str
    weights: str | None
    shape: str | None
    normalise: str | None
    device: str
    seed: int

    def open(self) -> OpenModel:
        """The network on its device; fresh weights are drawn under the seed."""
        device, shape = find_device(self.device), parse_shape(self.shape)
        torch.manual_seed(self.seed)
        opened = open_model(self.spec, self.weights)
        return replace(opened, model=opened.model.to(device), input=choose_input(opened.input, shape, self.normalise))


def is_untrained(spec: str, weights: str | None) -> bool:
    """Whether a network comes with fresh weights; a factory of the user's own may load them itself."""
    return weights is None and spec.partition(":")[0] in ("recoup", "torchvision", "timm")


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it and it can hold the float64 that statistics are kept in."""
    try:
        device = torch.device(name)
        torch.zeros((), dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(f"device '{name}' is not available here ({_first_line(error)}). Use --device cpu.") from error
    return device


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """`3,32,32` as numbers."""
    if text is None:
        return None
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"--input '{text}' is not a shape. Write the sizes of one input, such as 3,32,32.")
    return shape


def choose_input(declared: InputSpec, shape: tuple[int, ...] | None, normalise: str | None) -> InputSpec:
    """What the model declares, unless a shape or a normalisation was given."""
    shape = shape or declared.shape
    plain = unnormalised(shape, declared.tokens)
    if normalise == "none" or declared.tokens:
        return plain
    known = {"cifar": CIFAR, "imagenet": IMAGENET}
    source = declared if normalise is None else known[normalise]
    if normalise is None and len(source.mean) != shape[0]:
        return plain
    return InputSpec(shape, source.mean, source.std)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
