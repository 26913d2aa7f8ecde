"""Networks through both sides, each in a process of its own that may crash, hang or run out of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.zoo.rows import Row, Side, failed, from_json
from benchmarks.zoo.store import Store


@dataclass(frozen=True, slots=True)
class Task:
    """One network and the side that is to prune it."""

    suite: str
    name: str
    side: Side


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and gibibytes for one network (0: no limit of memory), and how many are worked on at once."""

    seconds: float = 600.0
    memory: float = 0.0
    jobs: int = 1


def run(tasks: Iterable[Task], store: Store, limits: Limits, work: Callable[[Task, Limits], Row]) -> None:
    """Work through the tasks, and print a line for each as it ends."""
    waiting = list(tasks)
    done, counting = 0, threading.Lock()

    def one(task: Task) -> None:
        nonlocal done
        start = time.perf_counter()
        row = work(task, limits)
        store.add(task.name, task.side, row)
        with counting:
            done += 1
            spent = time.perf_counter() - start
            print(f"{done}/{len(waiting)} {_line(task, row)} {spent:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(limits.jobs) as pool:
        list(pool.map(one, waiting))


def in_a_process(task: Task, limits: Limits) -> Row:
    """The row of one network, made by `benchmarks.zoo.child`."""
    command = [sys.executable, "-m", "benchmarks.zoo.child", task.suite, task.name, task.side, str(limits.memory)]
    return attempt(command, task.side, limits)


def attempt(command: list[str], side: Side, limits: Limits) -> Row:
    """The row that a command writes into the file named last; whatever goes wrong is a row as well."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        try:
            ended = subprocess.run(
                [*command, str(file)], capture_output=True, text=True, timeout=limits.seconds, env=_environment(limits)
            )
        except subprocess.TimeoutExpired:
            return failed(side, "time-out", f"not done after {limits.seconds:.0f} s")
        if ended.returncode == 0 and file.exists():
            return from_json(side, json.loads(file.read_text()))
        return failed(side, "crash", _cause(ended))


def _environment(limits: Limits) -> dict[str, str]:
    """The caller's, with the cores shared out unless the caller did."""
    threads = max(1, (os.cpu_count() or 1) // limits.jobs)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def _cause(ended: subprocess.CompletedProcess[str]) -> str:
    if ended.returncode < 0:
        return f"killed by {signal.Signals(-ended.returncode).name}"
    lines = ended.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {ended.returncode}"


def _line(task: Task, row: Row) -> str:
    kept = "" if row.kept is None else f", {row.kept:.0%} of the MACs kept"
    why = f" ({row.why[:90]})" if row.why else ""
    return f"{task.suite} {task.name} {task.side}: {row.result}{kept}{why}"
