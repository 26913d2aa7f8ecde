"""Networks in every way that was asked for, each in a process of its own that may crash, hang or run out of memory."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.zoo.rows import CopiesRow, Row, Way, failed, from_json
from benchmarks.zoo.store import Store
from benchmarks.zoo.task import Task

# Children are forked by a process of one thread that has imported the libraries.
FORKS = multiprocessing.get_context("forkserver")
LINES = 12  # of what a crashed child had to say


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and gibibytes for one network (0: no limit of memory), and how many are worked on at once."""

    seconds: float = 600.0
    memory: float = 0.0
    jobs: int = 1


def run(tasks: Iterable[Task], store: Store, limits: Limits, make: Callable[[Task, Limits], Row]) -> None:
    """Work through the tasks, and print a line for each as it ends."""
    waiting = list(tasks)
    done, counting = 0, threading.Lock()

    def one(task: Task) -> None:
        nonlocal done
        start = time.perf_counter()
        row = make(task, limits)
        store.add(task.name, task.way, row)
        with counting:
            done += 1
            spent = time.perf_counter() - start
            print(f"{done}/{len(waiting)} {_line(task, row)} {spent:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(limits.jobs) as pool:
        list(pool.map(one, waiting))


def preload(modules: Iterable[str]) -> None:
    """Import these once for all children; what cannot be imported is passed over."""
    FORKS.set_forkserver_preload(["benchmarks.zoo.child", *modules])


def in_a_process(task: Task, limits: Limits) -> Row:
    """The row of one network, made by `benchmarks.zoo.child`."""
    return attempt(functools.partial(_work, task, limits), task.way, limits)


def attempt(write: Callable[[Path], None], way: Way, limits: Limits) -> Row:
    """The row that a child writes into a file; whatever goes wrong is a row as well."""
    with tempfile.TemporaryDirectory() as folder:
        file, said = Path(folder) / "row.json", Path(folder) / "stderr"
        child = FORKS.Process(target=_child, args=(write, file, said))
        child.start()
        child.join(limits.seconds)
        if child.is_alive():
            child.kill()
            child.join()
            return failed(way, "time-out", f"not done after {limits.seconds:.0f} s")
        row = _row(child.exitcode or 0, file, said, way)
        if row.result == "crash":
            print(*said.read_text().splitlines()[-LINES:], sep="\n", file=sys.stderr)
        return row


def _work(task: Task, limits: Limits, file: Path) -> None:
    from benchmarks.zoo.child import work  # in the child alone, for the libraries that it imports

    shared = max(1, (os.cpu_count() or 1) // limits.jobs)
    threads = None if "OMP_NUM_THREADS" in os.environ else shared  # unless the caller shared the cores out
    work(task, limits.memory, threads, file)


def _child(write: Callable[[Path], None], file: Path, said: Path) -> None:
    """What runs in the fork: its stderr goes to a file, so that what torch's own code says is kept as well."""
    sys.stderr = said.open("w", buffering=1)  # left open, for what is said of an error at the very end
    os.dup2(sys.stderr.fileno(), 2)
    write(file)


def _row(code: int, file: Path, said: Path, way: Way) -> Row:
    if code == 0 and file.exists():
        return from_json(way, json.loads(file.read_text()))
    if code < 0:
        return failed(way, "crash", f"killed by {signal.Signals(-code).name}")
    lines = said.read_text().strip().splitlines()
    return failed(way, "crash", lines[-1][:200] if lines else f"exit code {code}")


def _line(task: Task, row: Row) -> str:
    share = None if isinstance(row, CopiesRow) else row.kept
    kept = "" if share is None else f", {share:.0%} of the MACs kept"
    why = f" ({row.why[:90]})" if row.why else ""
    return f"{task.suite} {task.name} {task.way}: {row.result}{kept}{why}"
