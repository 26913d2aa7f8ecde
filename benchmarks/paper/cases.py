"""What the experiments ask for and what comes of it: a case, its outcome, and the row that holds both in a file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean, stdev
from typing import Any

from benchmarks.rows import Plain

PAPER, RELEASED, BEST = "paper", "released", "best"


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a method and the seed of its calibration sample; all that is not varied is empty.

    tolerance: in points. kept: share of the MACs. data: calibration images as "source:count". epochs: of retraining.
    The other fields are those of the method, the method's own value where they are empty.
    """

    network: str
    method: str = PAPER
    seed: int = 0
    tolerance: float | None = None
    kept: float | None = None
    data: str = ""
    selector: str = ""
    recovery: str = ""
    order: str = ""
    constraint: str = ""
    unit: str = ""
    weighting: str = ""
    epochs: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case; numbers that are not there are None, and `note` says why.

    removed, flops_removed: percent of the MACs, and of the paper's count with batch norms and activations. top1, base:
    points on test images, afterwards and before. kl: in nats, on test images. evaluations: measurements that the search
    made. stages: seconds, those of shared stages too. memory: peak of the GPU's memory by stage, in bytes.
    sparsity: share of channels removed, by group. losses: by group, at the sparsities of the experiment.
    """

    removed: float | None = None
    flops_removed: float | None = None
    top1: float | None = None
    base: float | None = None
    validation_drop: float | None = None
    test_drop: float | None = None
    kl: float | None = None
    evaluations: int | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    sparsity: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    note: str = ""

    @property
    def flops(self) -> float | None:
        """Percent of the FLOPs removed: the paper's count, or the MACs where there is no other."""
        return self.removed if self.flops_removed is None else self.flops_removed

    @property
    def seconds(self) -> float:
        """Those of all stages together."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a row was made with: versions, machine, the command, and in which precision the search measured.

    shared: processes that worked on the machine at the same time, this one counted. With several, seconds are longer
    than those of one alone.
    """

    versions: Mapping[str, str]
    machine: str
    command: str
    evaluate: str = "float32"
    shared: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A case, its outcome, and what it was made with."""

    case: Case
    outcome: Outcome
    stamp: Stamp

    def plain(self) -> Plain:
        """For the file."""
        seed = {"seed": self.case.seed}
        return {"case": asdict(self.case), "outcome": asdict(self.outcome), **seed, **asdict(self.stamp)}


def read_row(plain: Plain) -> Row:
    """The row that the file has."""
    stamp = {part.name: plain[part.name] for part in fields(Stamp) if part.name in plain}
    return Row(key_of(plain), Outcome(**plain["outcome"]), Stamp(**stamp))


def key_of(plain: Plain) -> Case:
    """The case of a row in the file."""
    return Case(**plain["case"])


NAMES = ("network", "method", "data", "selector", "recovery", "order", "constraint", "unit", "weighting")
NUMBERS = ("kept", "epochs", "tolerance", "seed")


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows sorted by their cases: names as they first come, numbers from the least on.

    Several processes finish in any order; the table is the same.
    """
    places = {name: {value: i for i, value in enumerate(_values_of(rows, name))} for name in NAMES}

    def key(row: Row) -> tuple[float, ...]:
        names = (places[name][getattr(row.case, name)] for name in NAMES)
        return *names, *(getattr(row.case, name) or 0 for name in NUMBERS)

    return sorted(rows, key=key)


def _values_of(rows: Iterable[Row], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(row.case, name) for row in rows))


def grouped(rows: Iterable[Row], key: Callable[[Case], Hashable]) -> list[list[Row]]:
    """The rows in groups of one key, in the order of their first rows."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row.case), []).append(row)
    return list(groups.values())


def measured(rows: Iterable[Row], **fields_: Any) -> list[Row]:
    """The rows that came to something and whose cases have these values."""
    return [
        row
        for row in rows
        if not row.outcome.note and all(getattr(row.case, name) == value for name, value in fields_.items())
    ]


def values(rows: Iterable[Row], of: str) -> list[float]:
    """One number of every outcome that came to something and has it."""
    found = (getattr(row.outcome, of) for row in rows if not row.outcome.note)
    return [float(value) for value in found if value is not None]


def average(rows: Iterable[Row], of: str) -> float:
    """The mean of one number of the outcomes."""
    return fmean(values(rows, of))


def shown(rows: Sequence[Row], of: str, form: str = ".2f") -> str:
    """The mean as text, with the standard deviation of several; a dash, or the note, where there is none."""
    found = values(rows, of)
    if not found:
        notes = [" ".join(row.outcome.note.split()).replace("|", "/")[:80] for row in rows if row.outcome.note]
        return notes[0] if notes else "-"
    spread = f" ± {stdev(found):{form}}" if len(found) > 1 else ""
    return f"{fmean(found):{form}}{spread}"


def against(rows: Sequence[Row], of: str, published: float | None, form: str = ".2f") -> str:
    """Three cells: the paper's figure, ours, and the difference; dashes where one is missing."""
    theirs = "-" if published is None else f"{published:.2f}"
    found = values(rows, of)
    difference = "-" if published is None or not found else f"{fmean(found) - published:+{form}}"
    return f"{theirs} | {shown(rows, of, form)} | {difference}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; a cell may hold several, divided by bars, if the head does."""
    top = f"| {' | '.join(head)} |"
    rule = "|---" * (top.count("|") - 1) + "|"
    return "\n".join([top, rule, *(f"| {' | '.join(cells)} |" for cells in lines)])
