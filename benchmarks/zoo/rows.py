"""What is written down about one network: a row by us, a row by Torch-Pruning."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["ours", "theirs"]
SIDES: tuple[Side, ...] = ("ours", "theirs")

# Largest relative difference in float64 that is rounding: what deep networks of random weights make of 1e-16.
ROUNDING = 1e-6

NO_MEMORY = ("not enough memory", "allocate memory")  # in the messages of torch, which raises a RuntimeError


@dataclass(frozen=True, slots=True)
class Reason:
    """Why layers are locked, and the share of all MACs that are."""

    share: float
    text: str


@dataclass(frozen=True, slots=True)
class OurRow:
    """What Recoup makes of one network.

    result: "pruned", "untouched" (nothing is free), "refused", "forward crashes" (for another number of samples than
    the proof's), "crash" or "time-out"; `why` says more.
    goal: "half" of all MACs, or "half way" to the least possible where half is out of reach.
    macs, kept: per sample, and the share of them that is kept: counted while the models run.
    least: share of MACs left when every prunable group is at its last channel.
    locked: share of MACs in layers without a free channel on either side, and in operations that belong to no layer.
    form: "class" when the result is a module of the network's own class.
    said: `macs` as Recoup counts them.
    """

    result: str
    why: str = ""
    goal: str = ""
    macs: int | None = None
    kept: float | None = None
    least: float | None = None
    locked: float | None = None
    reasons: tuple[Reason, ...] = ()
    form: str = "class"
    difference: float | None = None
    same_shapes: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    said: int | None = None


@dataclass(frozen=True, slots=True)
class TheirRow:
    """What Torch-Pruning makes of one network.

    result: "pruned", "untouched", "shapes changed", "forward crashes", "crash" or "time-out"; `why` says more.
    difference: from the original with the same channels zeroed, relative; None where that could not be compared.
    """

    result: str
    why: str = ""
    macs: int | None = None
    kept: float | None = None
    difference: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


Row = OurRow | TheirRow


def to_json(row: Row) -> dict[str, Any]:
    """Plain data."""
    return dataclasses.asdict(row)


def from_json(side: Side, data: dict[str, Any]) -> Row:
    """The row that `to_json` made."""
    if side == "theirs":
        return TheirRow(**data)
    reasons = tuple(Reason(**reason) for reason in data.get("reasons", ()))
    return OurRow(**{**data, "reasons": reasons})


def failed(side: Side, result: str, why: str) -> Row:
    """The row of a network that got nowhere."""
    return OurRow(result, why) if side == "ours" else TheirRow(result, why)


def brief(error: BaseException) -> str:
    """The kind of an error and its first line, cut to what fits in a table."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in NO_MEMORY):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
