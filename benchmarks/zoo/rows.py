"""What is written down about one network: a row for every way of pruning it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Way = Literal["magnitude", "torch-pruning", "fast", "best", "fast-copies", "best-copies"]
WAYS: tuple[Way, ...] = ("magnitude", "torch-pruning", "fast", "best", "fast-copies", "best-copies")

# Largest relative difference in float64 that is rounding: what deep networks of random weights make of 1e-16.
ROUNDING = 1e-6

# Of the spread of the outputs, what a network of exact copies may lose at half its width, in float32.
LOST = 1e-4

NO_MEMORY = ("not enough memory", "allocate memory")  # in the messages of torch, which raises a RuntimeError
FALLBACK = "the paper's method is used"  # how the warning begins
LONGEST = 300  # characters of a message that are kept


@dataclass(frozen=True, slots=True)
class Reason:
    """Why layers are locked, and the share of all MACs that are."""

    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Locks:
    """The share of MACs that is locked, and what locks most of it."""

    share: float
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class CutRow:
    """What a magnitude cut and its proof make of one network.

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


@dataclass(frozen=True, slots=True)
class Setting:
    """What a row was made with: numbers of samples, side of the images where there are any, and the machine."""

    samples: int
    size: int | None
    machine: str


@dataclass(frozen=True, slots=True)
class PrunedRow:
    """What `recoup.prune` makes of one network with a method of its own.

    result, goal, locked, reasons, form: as in a `CutRow`. macs, kept: too, of a call with a single sample, as in the
    report: what is computed of parameters alone is then counted once.
    said, left: MACs before and after, as the report has them; `counted` are those of the original by torch's operation,
    where one of the two differs.
    warned: what was warned of. error: of the outputs on held-out samples. difference: of the proof.
    memory: the most that the process held at once, beyond what it held before the network was built, in MiB; on a GPU,
    in the memory of that.
    """

    result: str
    why: str = ""
    setting: Setting | None = None
    goal: str = ""
    macs: int | None = None
    kept: float | None = None
    said: int | None = None
    left: int | None = None
    counted: dict[str, int] = field(default_factory=dict)
    locked: float | None = None
    reasons: tuple[Reason, ...] = ()
    form: str = "class"
    warned: tuple[str, ...] = ()
    error: float | None = None
    difference: float | None = None
    same_shapes: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    memory: int | None = None

    @property
    def fell_back(self) -> bool:
        """Whether another method did the work."""
        return any(text.startswith(FALLBACK) for text in self.warned)


@dataclass(frozen=True, slots=True)
class CopiesRow:
    """What a network loses at half its width when half of every group are copies of the other half.

    result: "kept", "lost", "no copies" (none could be made that the network itself does not tell apart), "refused",
    "crash" or "time-out"; `why` says more.
    goal: "half" of every width, or "widths" where a group is of an odd width or locked in part.
    apart: error of the network in which nobody reads a copy, so that it shows whether they are copies.
    error: of the smaller network on `inputs`: "new" ones, or those "seen" where channels are gone that were constant on
    all of them. Both are relative to the spread of the outputs.
    """

    result: str
    why: str = ""
    setting: Setting | None = None
    goal: str = ""
    gone: int | None = None
    channels: int | None = None
    apart: float | None = None
    inputs: str = "new"
    error: float | None = None
    warned: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    memory: int | None = None


Row = CutRow | TheirRow | PrunedRow | CopiesRow

KINDS: dict[Way, type[Row]] = {
    "magnitude": CutRow,
    "torch-pruning": TheirRow,
    "fast": PrunedRow,
    "best": PrunedRow,
    "fast-copies": CopiesRow,
    "best-copies": CopiesRow,
}


def to_json(row: Row) -> dict[str, Any]:
    """Plain data."""
    return dataclasses.asdict(row)


def from_json(way: Way, data: dict[str, Any]) -> Row:
    """The row that `to_json` made."""
    found = dict(data)
    if "reasons" in found:
        found["reasons"] = tuple(Reason(**reason) for reason in found["reasons"])
    if found.get("setting") is not None:
        found["setting"] = Setting(**found["setting"])
    if "warned" in found:
        found["warned"] = tuple(found["warned"])
    return KINDS[way](**found)


def failed(way: Way, result: str, why: str) -> Row:
    """The row of a network that got nowhere."""
    return KINDS[way](result, why)


def brief(error: BaseException) -> str:
    """The kind of an error and its first line, cut to what fits in a table."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in NO_MEMORY):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:LONGEST]}" if lines else type(error).__name__
