"""Everything that can be set, in one frozen object, and the presets by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from recoup.algebra.selection import Selector, find_selector
from recoup.errors import UsageError, unknown_name

Weighting = Literal["slope", "none"]
Constraint = Literal["step", "global"]
Order = Literal["bottom-up", "top-down", "random"]
Unit = Literal["layer", "block"]
Method = Literal["binary", "measured"]
Way = Literal["once", "sequence"]
Outputs = Literal["auto", "classes", "values"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to prune.

    selector: ranks the channels of a group; a name or a function.
    weighting: "slope" weighs every position by the mean of g'(y)^2 over the outputs, g being the batch norm and
        activation behind the layer; "none" weighs all alike.
    rescale: scale every refitted output back to its original variance.
    ridge: added to the diagonal of a covariance, relative to its mean.
    positions: output positions per image and batch that enter the statistics; None for all.
    search: "binary" is the paper's structural search, layer by layer, and the same share of every group for a budget;
        "measured" asks the network what each group is worth and allots accordingly.
    rounds: of measuring; from the second on in the pruned network, where recovery in sequence makes a difference. For a
        tolerance or a latency there is one.
    recovery: "once" from the statistics of the original network; "sequence" layer by layer in the pruned one, where
        held-out images show that to be better.
    ridges: strengths, relative as `ridge`, of the pull towards the one-pass weights that held-out images choose from
        when a layer is refitted in sequence; infinity stays there.
    joint: at most so many Gauss-Newton steps on every pair of layers with pruned channels between them; they end when
        held-out images gain nothing more.
    span: how many such pairs are refitted at once where the second layer ends in an addition.
    confidence: with which the tolerance holds on images that were not looked at; None to ask it only of the others.
    outputs: "classes" are compared by their divergence, "values" by their squared error; "auto" takes a single output
        of shape (samples, n) for classes.
    steps: bisections per layer of the structural search.
    constraint: "step" allows layer i of L the share i/L of the tolerance; "global" all of it from the start.
    order: in which the search visits layers.
    unit: what it visits: every "layer" (group of channels) alone, or all groups of a residual "block" together.
    classifier: whether the search may prune what the last layer reads.
    multiple_of: every layer makes a multiple of so many outputs, or as many as before; "device" for what suits the
        model's device.
    seed: of everything that is drawn at random.
    """

    selector: str | Selector = "forward"
    weighting: Weighting = "slope"
    rescale: bool = False
    ridge: float = 1e-6
    positions: int | None = 256
    search: Method = "binary"
    rounds: int = 1
    recovery: Way = "once"
    ridges: tuple[float, ...] = (1e-4, 1e-2, 1e-1, 1.0, math.inf)
    joint: int = 0
    span: int = 1
    confidence: float | None = None
    outputs: Outputs = "auto"
    steps: int = 3
    constraint: Constraint = "step"
    order: Order = "bottom-up"
    unit: Unit = "layer"
    classifier: bool = False
    multiple_of: int | Literal["device"] = 1
    seed: int = 0

    def __post_init__(self) -> None:
        find_selector(self.selector)
        _one_of("weighting", self.weighting, get_args(Weighting))
        _one_of("constraint", self.constraint, get_args(Constraint))
        _one_of("order", self.order, get_args(Order))
        _one_of("unit", self.unit, get_args(Unit))
        _one_of("search", self.search, get_args(Method))
        _one_of("recovery", self.recovery, get_args(Way))
        _one_of("outputs", self.outputs, get_args(Outputs))
        _at_least("ridge", self.ridge, 0)
        if not self.ridges or not all(ridge >= 0 for ridge in self.ridges):
            raise UsageError(f"ridges must be numbers of at least 0, one or more of them, got {self.ridges}.")
        _whole("rounds", self.rounds)
        _whole("joint", self.joint, least=0)
        _whole("span", self.span)
        if self.confidence is not None and not 0.5 <= self.confidence < 1:
            raise UsageError(f"confidence must be None or lie from 0.5 to below 1, got {self.confidence}.")
        _whole("steps", self.steps)
        _whole("multiple_of", 1 if self.multiple_of == "device" else self.multiple_of)
        _whole("positions", 1 if self.positions is None else self.positions)

    def multiple(self, device: str) -> int:
        """The multiple that widths are kept to on a kind of device."""
        return MULTIPLES.get(device, 8) if self.multiple_of == "device" else self.multiple_of


# What "device" stands for: tensor cores take half precision in eights; a CPU register holds up to 16 float32 values.
MULTIPLES = MappingProxyType({"cuda": 8, "cpu": 16})


def find_preset(name: str) -> Settings:
    """The settings of that name."""
    _one_of("preset", name, tuple(PRESETS))
    return PRESETS[name]


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
            if not 0 < value <= 1:
                raise UsageError(f"Budget({name}={value}): the share to keep must lie above 0 and not above 1.")

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


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise unknown_name(what, value, allowed)


def _at_least(what: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise UsageError(f"{what} must be a number of at least {least}, got {value}.")


def _whole(what: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise UsageError(f"{what} must be a whole number of at least {least}, got {value}.")


_BEST = Settings(
    selector="backward",
    weighting="none",
    positions=64,
    search="measured",
    rounds=2,
    recovery="sequence",
    joint=4,
    span=3,
    confidence=0.95,
)

PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        # All that pays, see docs/results.md.
        "best": _BEST,
        # The same but for the second round and the joint refits, which take most of the time.
        "fast": replace(_BEST, rounds=1, joint=0),
        # The paper as printed, with normalised weights and the tolerance split by layer that its text describes.
        "paper": Settings(),
        # The code its authors released: no slope weights, outputs rescaled to their old variance.
        "released": Settings(weighting="none", rescale=True),
    }
)
