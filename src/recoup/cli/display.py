"""Printing: results to stdout as tables or one JSON object, progress and notes to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import rich.progress
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recoup.progress import Progress
from recoup.report.content import GroupRow, Report
from recoup.report.formatting import duration

# Where nobody looks at a terminal, lines need not fit one.
PIPED_WIDTH = 200
BAR_LENGTH = 24


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout; numbers that JSON does not have become null."""
    click.echo(json.dumps(_finite(data), allow_nan=False))


def note(text: str) -> None:
    """A line beside the result, on stderr."""
    click.echo(text, err=True)


def warn_of_fresh_weights(spec: str) -> None:
    """Say that what follows is about a network that nobody has trained."""
    note(f"note: {spec} has fresh random weights; give --weights FILE for trained ones.")


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), rigid: Sequence[int] = ()
) -> None:
    """A table on stdout; columns in `numbers` are aligned to the right, and neither they nor the `rigid` are folded."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(heads):
        whole = place in numbers or place in rigid
        table.add_column(head, justify="right" if place in numbers else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def print_costs(report: Report, scores: Mapping[str, tuple[float, float]]) -> None:
    """Before and after: MACs, FLOPs, parameters, and whatever was measured, by name."""
    rows = [
        _cost_row("MACs", report.before.macs, report.after.macs),
        _cost_row("FLOPs", report.before.flops, report.after.flops),
        _cost_row("Parameters", report.before.parameters, report.after.parameters),
    ]
    if report.latency is not None:
        time = report.latency
        change = f"{time.share - 1:+.1%}"
        rows.append(("Time of a batch", duration(time.before), duration(time.after), change))
    rows += [(name, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f} points") for name, (a, b) in scores.items()]
    print_table(("", "Before", "After", "Change"), rows, numbers=(1, 2, 3))


def print_widths(report: Report) -> None:
    """Every group's width before and after, with a bar for what is left, what is locked and what was constant."""
    rows = (
        (g.name, str(g.before), str(g.after), _bar(g.after / max(1, g.before)), _remark(report, g))
        for g in report.groups
    )
    print_table(("Group", "Before", "After", "Kept", ""), rows, numbers=(1, 2), rigid=(3,))


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Bars on stderr where it is a terminal, otherwise the name of each stage as it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _announce_stages()
        return
    with rich.progress.Progress(console=console, transient=True) as bars:
        tasks: dict[str, rich.progress.TaskID] = {}

        def show(stage: str, done: int, total: int | None, /) -> None:
            if stage not in tasks:
                _finish(bars)
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def _finish(bars: rich.progress.Progress) -> None:
    """What came before a new stage is done, also where nobody knew how long it would be."""
    for task in bars.tasks:
        bars.update(task.id, total=task.completed)


def _announce_stages() -> Progress:
    seen: set[str] = set()

    def show(stage: str, _done: int, _total: int | None, /) -> None:
        if stage not in seen:
            seen.add(stage)
            note(f"{stage} ...")

    return show


def _console() -> Console:
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def _cost_row(name: str, before: int, after: int) -> tuple[str, str, str, str]:
    return name, f"{before:,}", f"{after:,}", f"{after / before - 1:+.1%}"


def _bar(share: float) -> str:
    full, empty = ("█", "░") if (sys.stdout.encoding or "").lower().startswith("utf") else ("#", ".")
    filled = max(1, round(share * BAR_LENGTH))
    return full * filled + empty * (BAR_LENGTH - filled)


def _remark(report: Report, group: GroupRow) -> str:
    constant = str(report.constant[group.name]) if group.name in report.constant else ""
    locked = f"{group.locked} locked: {'; '.join(group.reasons)}" if group.locked else ""
    return "; ".join(filter(None, (constant, locked)))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
