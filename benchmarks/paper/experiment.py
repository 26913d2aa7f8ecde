"""One frame for all experiments: cases become rows, rows become a table, a figure and a block of docs/paper.md.

Rows are stored as they come, so that a run can be stopped and continued. Cases that share a network, a sample and a
selector stay together, in one process, where statistics and rankings are shared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import textwrap
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.machine import device_name, versions
from benchmarks.pages import replace_table
from benchmarks.paper import drawing
from benchmarks.paper.cases import Case, Outcome, Row, Stamp, in_order, key_of, read_row
from benchmarks.paper.elsewhere import found_elsewhere
from benchmarks.paper.opening import open_subject
from benchmarks.paper.workbench import Sample, precision_of, search
from benchmarks.rows import Plain, Store
from recoup.errors import ModelError, RecoupError

Options = argparse.Namespace
Measure = Callable[[Sample, Case, Options], Outcome]
# What must not differ between the rows of one file.
COMMON = (
    "smoke",
    "images",
    "validation_images",
    "test_images",
    "keep_class",
    "unit",
    "ridge",
    "weighting",
    "positions",
)
PAGE = "paper.md"
# Samples whose statistics are kept in memory.
SAMPLES = 2
# Lines of the page are no longer than this.
WIDTH = 116


@dataclass(frozen=True, slots=True)
class Experiment:
    """What an experiment varies (`cases`), how one case is measured, and how rows are shown and checked.

    `check` raises an AssertionError where the rows do not mean what they should; it looks at the rows that there are.
    """

    name: str
    title: str
    cases: Callable[[Options], list[Case]]
    table: Callable[[Sequence[Row]], str]
    draw: Callable[[Sequence[Row]], Figure]
    check: Callable[[Sequence[Row]], None]
    measure: Measure = search


def run(experiment: Experiment, options: Options) -> list[Row]:
    """The rows of all cases, those measured now and those stored before; table, figure and page are written."""
    path = options.out / f"{experiment.name}.json"
    if not options.table:
        store, cases = Store(path, settings_of(options), key_of), chosen_cases(experiment, options)
        if experiment.measure is search:
            for row in found_elsewhere(store.waiting(cases), options, settings_of(options)):
                store.add(row)
        for row in measured(experiment.measure, store.waiting(cases), options):
            store.add(row)
    rows = stored_rows(path)
    if rows:
        publish(experiment, rows, options.docs)
    return rows


def chosen_cases(experiment: Experiment, options: Options) -> list[Case]:
    """The cases that `--only` leaves: each field that it names has one of the values it gives."""
    return [
        case
        for case in experiment.cases(options)
        if all(str(asdict(case)[name]) in values for name, values in options.only.items())
    ]


def is_out_of_time(options: Options) -> bool:
    """Whether the minutes that the command line allows are over; a case that has begun is finished."""
    return options.until is not None and time.time() > options.until


def stored_rows(path: Path) -> list[Row]:
    """The rows in a file, in the order of `in_order`; none where there is no file."""
    return in_order([read_row(plain) for plain in json.loads(path.read_text())["rows"]]) if path.exists() else []


def settings_of(options: Options) -> Plain:
    """What all rows of a file have in common."""
    return {name: getattr(options, name) for name in COMMON}


def publish(experiment: Experiment, rows: Sequence[Row], docs: Path) -> None:
    """Write the figure, where any row came to something, and the block of the page where there is one."""
    if has_figure(rows):
        with drawing.drawing():
            drawing.save(experiment.draw(rows), docs / "paper" / f"{experiment.name}.svg")
    page = docs / PAGE
    if page.exists():
        page.write_text(replace_table(page.read_text(), experiment.name, block(experiment, rows)))


def block(experiment: Experiment, rows: Sequence[Row]) -> str:
    """The figure, the table, and what the rows were made with."""
    figure = f"![{experiment.title}](paper/{experiment.name}.svg)\n\n" if has_figure(rows) else ""
    return f"{figure}{experiment.table(rows)}\n\n{made_with(rows)}"


def has_figure(rows: Sequence[Row]) -> bool:
    """Whether any row has numbers to draw."""
    return any(not row.outcome.note for row in rows)


def made_with(rows: Sequence[Row]) -> str:
    """Seeds, versions, machine and commands, in lines that fit the page."""
    seeds = ", ".join(str(seed) for seed in sorted({row.case.seed for row in rows}))
    made = dict.fromkeys(", ".join(f"{k} {v}" for k, v in row.stamp.versions.items()) for row in rows)
    machines = dict.fromkeys(row.stamp.machine for row in rows)
    precisions = dict.fromkeys(row.stamp.evaluate for row in rows)
    said = f"Seeds {seeds}. {'; '.join(made)}. {'; '.join(machines)}. The search measured in {' or '.join(precisions)}."
    most = max(row.stamp.shared for row in rows)
    if most > 1:
        said += f" Up to {most} processes shared the machine: seconds are longer than those of one alone."
    commands = dict.fromkeys(row.stamp.command for row in rows)
    lines = [wrapped for command in commands for wrapped in wrapped_command(command)]
    return "\n".join([textwrap.fill(said, WIDTH), "```", *lines, "```"])


def wrapped_command(command: str) -> list[str]:
    """A command over several lines of the shell."""
    lines = textwrap.wrap(command, WIDTH - 6, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def measured(measure: Measure, cases: Sequence[Case], options: Options) -> Iterator[Row]:
    """The rows of the cases as they are done, by as many processes as asked for."""
    groups = together(cases)
    if options.jobs == 1 or len(groups) < 2:
        for group in groups:
            yield from rows_of(measure, group, options)
        return
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    spawning = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with (
        spawning.Manager() as manager,
        ProcessPoolExecutor(options.jobs, spawning, torch.set_num_threads, (threads,)) as pool,
    ):
        made = manager.Queue()
        work = [pool.submit(_send, measure, group, options, made) for group in groups]
        try:
            yield from _received(made, work)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def together(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases in groups that share a sample and a ranking, in the order of their first cases."""
    groups: dict[Hashable, list[Case]] = {}
    for case in cases:
        key = case.network, case.data, case.seed, case.method, case.selector, case.weighting, case.epochs
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def rows_of(measure: Measure, cases: Sequence[Case], options: Options) -> Iterator[Row]:
    """The rows of cases that belong together; what cannot be pruned so is a row too, with a note.

    A library that is missing says nothing about the case: it has no row, and stderr says why.
    """
    for case in cases:
        if is_out_of_time(options):
            return
        try:
            outcome = measure(sample_of(case, options), case, options)
        except ModelError as error:
            print(f"{case}: skipped, {error}", file=sys.stderr, flush=True)
            continue
        except RecoupError as error:
            outcome = Outcome(note=str(error))
        yield Row(case, outcome, stamp_of(case, options))


def sample_of(case: Case, options: Options) -> Sample:
    """The calibration sample of a case; the last few are remembered."""
    said = {name: repr(value) for name, value in vars(options).items() if name not in ("command", "until")}
    key = tuple(sorted(said.items()))
    return _sample(case.network, case.data, case.seed, _Remembered(key, options))


@dataclass(frozen=True, slots=True)
class _Remembered:
    """Options that are alike if their texts are."""

    key: tuple[tuple[str, str], ...]
    options: Options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remembered) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(SAMPLES)
def _sample(network: str, data: str, seed: int, remembered: _Remembered) -> Sample:
    return Sample(_subject(network, remembered), data, seed)


@lru_cache(SAMPLES)
def _subject(network: str, remembered: _Remembered) -> Any:
    return open_subject(network, remembered.options)


def stamp_of(case: Case, options: Options) -> Stamp:
    """What rows of this run are made with."""
    shared = options.jobs + options.beside
    return Stamp(versions(), device_name(options.device), options.command, precision_of(case, options), shared)


def _send(measure: Measure, cases: Sequence[Case], options: Options, made: Any) -> None:
    for row in rows_of(measure, cases, options):
        made.put(row)


def _received(made: Any, work: Sequence[Future[None]]) -> Iterator[Row]:
    """What the processes put into the queue until all of them are done; the first failure is raised."""
    while True:
        is_done = all(each.done() for each in work)
        try:
            yield made.get(timeout=0 if is_done else 1)
        except queue.Empty:
            for each in work:
                if each.done():
                    each.result()
            if is_done:
                return
