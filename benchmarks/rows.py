"""Rows of a benchmark on disk: one JSON file, complete after every row, so that a later call goes on where one stopped.

A row is a case, what was asked for, and its outcome, what came of it. In the file both lie side by side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from recoup.errors import UsageError

Plain = dict[str, Any]
"""A row as the file has it."""

Key = TypeVar("Key", bound=Hashable)


class Stored(Protocol):
    """A row of any benchmark: its case, by which it is known, and the form it has in the file."""

    @property
    def case(self) -> Hashable:
        """What was asked for."""

    def plain(self) -> Plain:
        """For the file."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a method, the seed of the calibration sample, and the share of the MACs to remove or the tolerance."""

    network: str
    method: str
    seed: int
    share: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case; numbers that are not there are None, and `note` says why.

    removed: share of the MACs. top1, drops and bound: in points; `top1` on test images, or validation images where
    there are no others, and so `kl`, in nats. noise: the standard error of `test_drop`. output_error: on held-out
    images. seconds: of making it, by stage in `stages`. Choices go by `validation_drop`, `validation_kl` and
    `output_error`; rows of older files lack the second and the noise.
    """

    removed: float | None = None
    top1: float | None = None
    validation_drop: float | None = None
    test_drop: float | None = None
    kl: float | None = None
    validation_kl: float | None = None
    output_error: float | None = None
    bound: float | None = None
    noise: float | None = None
    seconds: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    device: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A case and its outcome."""

    case: Case
    outcome: Outcome

    def plain(self) -> Plain:
        """For the file."""
        return {**asdict(self.case), **asdict(self.outcome)}


def case_of(row: Plain) -> Case:
    """The case of a row in the file."""
    return Case(**{part.name: row[part.name] for part in fields(Case)})


class Store:
    """The rows in a file, which is written whenever one comes; without a path they are only kept in memory.

    `settings` are those that all rows of a file have in common. `key_of` reads the case from a row in the file; a
    benchmark with cases of its own gives its own.

    Raises:
        UsageError: the file's rows were made with other settings.
    """

    def __init__(self, path: Path | None, settings: Plain, key_of: Callable[[Plain], Hashable] = case_of) -> None:
        self._path, self._settings, self._key_of = path, settings, key_of
        found = json.loads(path.read_text()) if path is not None and path.exists() else {}
        if found and found["settings"] != settings:
            raise UsageError(
                f"the rows in {path} were made with {found['settings']}, not with {settings}. Give the same options, "
                "or another file with --out."
            )
        self.rows: list[Plain] = found.get("rows", [])

    def waiting(self, cases: Iterable[Key]) -> list[Key]:
        """Those of `cases` that have no row yet."""
        known = {self._key_of(row) for row in self.rows}
        return [case for case in cases if case not in known]

    def add(self, row: Stored) -> None:
        """Keep a row, in the place of an older one of its case, and say so on stderr."""
        print(json.dumps(row.plain()), file=sys.stderr, flush=True)
        self.rows = [*(old for old in self.rows if self._key_of(old) != row.case), row.plain()]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps({"settings": self._settings, "rows": self.rows}, indent=1) + "\n")
            fresh.replace(self._path)


def alike(rows: Iterable[Plain], *names: str) -> list[list[Plain]]:
    """The rows in groups that agree in these fields, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[Plain]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def mean(rows: Sequence[Plain], name: str, form: str = ".2f") -> str:
    """The mean of a field as text; a dash where no row has it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return format(sum(values) / len(values), form) if values else "-"


def mean_and_values(rows: Sequence[Plain], name: str, form: str = ".2f") -> str:
    """The mean, with the values of several rows in brackets."""
    values = [format(row[name], form) for row in sorted(rows, key=lambda row: row["seed"]) if row[name] is not None]
    return mean(rows, name, form) + (f" ({' / '.join(values)})" if len(values) > 1 else "")
