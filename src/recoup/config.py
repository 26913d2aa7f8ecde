"""What a user may ask for: budgets, and what the stages of the pipeline read of a method.

The methods themselves, `Best`, `Fast`, `Paper` and `Released`, are in `recoup.methods`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from recoup.algebra.selection.problem import Selector
from recoup.errors import UsageError, require_kind, shown, unknown_name

Weighting = Literal["slope", "outputs", "none"]
Outputs = Literal["auto", "classes", "values"]

# What "device" stands for: tensor cores take half precision in eights; a CPU register holds up to 16 float32 values.
MULTIPLES = MappingProxyType({"cuda": 8, "cpu": 16})
# Random generators take no larger seeds.
SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Budget:
    """The share to keep, of exactly one thing: `macs`, `parameters`, the `width` of every group, or `latency`.

    Latency is the time that the first calibration batch takes on the model's device.

    >>> Budget(macs=0.5).share
    0.5
    """

    macs: float | None = None
    parameters: float | None = None
    width: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in self._all().items() if value is not None}
        if len(given) != 1:
            names = ", ".join(self._all())
            raise UsageError(f"a Budget names exactly one of {names}; got {len(given)} of them.")
        for name, value in given.items():
            if not is_number(value) or not 0 < value <= 1:
                raise UsageError(f"Budget({name}={value!r}): the share to keep must lie above 0 and not above 1.")
            object.__setattr__(self, name, plain_number(value))

    @property
    def of(self) -> str:
        """What the share is of."""
        return next(name for name, value in self._all().items() if value is not None)

    @property
    def share(self) -> float:
        """The share to keep."""
        return next(value for value in self._all().values() if value is not None)

    def _all(self) -> dict[str, float | None]:
        return {"macs": self.macs, "parameters": self.parameters, "width": self.width, "latency": self.latency}


class Method(Protocol):
    """What every method tells the stages that all methods share, and the two stages that are its own."""

    @property
    def selector(self) -> str | Selector:
        """Ranks the channels of a group."""
        ...

    @property
    def weighting(self) -> Weighting:
        """How positions count in the statistics: by the slope of the activation, for each output, or all alike."""
        ...

    @property
    def ridge(self) -> float:
        """Added to the diagonal of a covariance, relative to its mean."""
        ...

    @property
    def positions(self) -> int | None:
        """Output positions per image and batch that enter the statistics; None for all."""
        ...

    @property
    def multiple_of(self) -> int | Literal["device"]:
        """Layers keep multiples of so many outputs."""
        ...

    @property
    def seed(self) -> int:
        """Random seed."""
        ...

    @property
    def confidence(self) -> float | None:
        """Probability that a tolerance also holds on unseen images; None checks the images at hand only."""
        ...

    @property
    def holds_out(self) -> bool:
        """Whether a fifth of the calibration images is held out to judge by."""
        ...

    def allocate(self, calibration: Any, rankings: Any, goal: Any, acceptance: Any, progress: Any, /) -> Any:
        """How many channels every group keeps: an `Allocation`."""
        ...

    def recover(self, calibration: Any, allocation: Any, progress: Any, /) -> Any:
        """The plan that refits what is left: a `Recovered`."""
        ...


@runtime_checkable
class SequentialMethod(Method, Protocol):
    """A method that refits layers one after the other in the pruned network, and judges by held-out images.

    ridges: strengths of the pull towards the one-pass weights, of which held-out images choose; infinity stays there.
    rounds: of measuring groups; from the second on in the pruned network.
    joint_steps: at most so many Gauss-Newton steps on every segment; none refits no layers jointly.
    span: how many pairs of layers a segment has where it ends in an addition.
    """

    @property
    def ridges(self) -> tuple[float, ...]: ...  # noqa: D102 - described above

    @property
    def rounds(self) -> int: ...  # noqa: D102

    @property
    def joint_steps(self) -> int: ...  # noqa: D102

    @property
    def span(self) -> int: ...  # noqa: D102

    @property
    def outputs(self) -> Outputs:
        """What the model returns: class scores or values; auto takes a single output (samples, n) for scores."""
        ...

    @property
    def refine(self) -> float:
        """Seconds of gradient steps towards the original's outputs at the end."""
        ...


# What `Method` asks of every method, by name.
ASKED_OF_METHODS = (
    "selector", "weighting", "ridge", "positions", "multiple_of", "seed", "confidence", "holds_out",
    "allocate", "recover",
)  # fmt: skip


def require_method(method: object) -> None:
    """Refuse what is no value of a method: a name, a class, or a value that lacks what the stages read of it."""
    if isinstance(method, str):
        raise UsageError(f"method must be a value here, such as recoup.Best(), got the name {method!r}.")
    if isinstance(method, type) or not hasattr(method, "allocate"):
        raise UsageError(f"method must be a name or a value such as recoup.Best(), got {shown(method)}.")
    missing = [name for name in ASKED_OF_METHODS if not hasattr(method, name)]
    if missing:
        raise UsageError(
            f"method {type(method).__name__} lacks {', '.join(missing)}. CONTRIBUTING.md shows what a method has."
        )


def require_progress(progress: object) -> None:
    """Refuse what cannot be called with a stage, the steps done and their number."""
    if not callable(progress):
        raise UsageError(f"progress must be a function of (stage, done, total), got {shown(progress)}.")
    try:
        signature = inspect.signature(progress)
    except (TypeError, ValueError):  # a function without one, of another language
        return
    try:
        signature.bind("stage", 0, None)
    except TypeError as error:
        raise UsageError(
            f"progress is called as progress(stage, done, total), which {shown(progress)} does not take: {error}."
        ) from error


def require_flag(what: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    require_kind(what, value, bool, "True or False")


def require_choice(what: str, value: object) -> None:
    """Refuse what is neither True, False nor None."""
    require_kind(what, value, (bool, type(None)), "True or False, or None for whichever is better")


def require_names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names in a list; one text in the place of a list is refused, and so is what is no text in it."""
    if isinstance(names, str):
        raise UsageError(f"{what} must be a list of names, got the text {names!r}. Write [{names!r}].")
    try:
        listed = tuple(names)
    except TypeError:
        raise UsageError(f"{what} must be a list of names, got {shown(names)}.") from None
    for name in listed:
        require_kind(f"every name in {what}", name, str, "a text")
    return listed


def is_number(value: object) -> bool:
    """Whether a value is a real number, of Python's or numpy's, and no flag."""
    return isinstance(value, Real) and not isinstance(value, bool)


def plain_number(value: Any) -> float:
    """The same number as Python's own, which can be written to a file."""
    return value if type(value) in (int, float) else float(value)


def require_one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a name that is not among those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise unknown_name(what, value, allowed)


def require_at_least(what: str, value: float, least: float) -> None:
    """Refuse what is no number, or a smaller one."""
    if not is_number(value) or not least <= value < math.inf:
        raise UsageError(f"{what} must be a number of at least {least}, got {value}.")


def require_whole(what: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} must be a whole number of at least {least}, got {value}.")


def require_common(method: Method) -> None:
    """Check the fields that every method has."""
    require_at_least("ridge", method.ridge, 0)
    is_device = isinstance(method.multiple_of, str) and method.multiple_of == "device"
    require_whole("multiple_of", 1 if is_device else method.multiple_of)
    require_whole("positions", 1 if method.positions is None else method.positions)
    require_whole("seed", method.seed, least=0)
    if method.seed >= SEEDS:
        raise UsageError(f"seed must be below 2 to the power of 63, got {method.seed}.")


def multiple_on(method: Method, device: str) -> int:
    """The multiple that widths are kept to on a kind of device."""
    return MULTIPLES.get(device, 8) if method.multiple_of == "device" else method.multiple_of


@dataclass(frozen=True, slots=True)
class Limits:
    """How many channels groups may keep: widths by hand, and the fewest for all others."""

    widths: Mapping[str, int]
    min_width: int = 1

    def __post_init__(self) -> None:
        require_whole("min_width", self.min_width)
        require_kind("widths", self.widths, Mapping, "a dict of channels by name, such as {'conv1': 48}")
        for name, width in self.widths.items():
            require_kind("every name in widths", name, str, "a text")
            require_whole(f"widths[{name!r}]", width)

    def least(self, name: str, width: int) -> int:
        """The fewest channels a group of that width may keep."""
        return self.widths.get(name, min(self.min_width, width))

    def most(self, name: str, width: int) -> int:
        """The most channels a group may keep."""
        return self.widths.get(name, width)
