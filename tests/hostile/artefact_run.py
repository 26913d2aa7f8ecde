"""Mutants one after another, in a process with little memory that is watched: what it imports, runs and writes.

The law: a mutant loads and computes what the saved model did, or `recoup.load` refuses it with an error of its own. No
other exception, no hang, no more than 1 GB, nothing imported, nothing run, nothing written.
"""

from __future__ import annotations

import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS, BYTES = 5, 1 << 30
RIGHT, REFUSED, WRONG = "loaded right", "refused", "wrong"


@dataclass
class Tally:
    """How many mutants ended how, and what was wrong with those that were."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        total = sum(self.counts.values())
        told = ", ".join(f"{self.counts[kind]} {kind}" for kind in (RIGHT, REFUSED, WRONG))
        return f"{total} mutants: {told} ({total / max(self.seconds, 1e-9):.0f} a second)"


def run(count: int, seed: int, first: int = 0) -> Tally:
    """So many mutants of a seed; a process that dies is counted as a wrong mutant and another one goes on."""
    tally, number = Tally(), first
    while number < first + count:
        number = _run_child(tally, seed, number, first + count)
    return tally


def _run_child(tally: Tally, seed: int, number: int, end: int) -> int:
    command = [sys.executable, "-m", "tests.hostile.artefact_run", str(seed), str(number), str(end)]
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up and stop the child
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert child.stdout is not None
    ready = selectors.DefaultSelector()
    ready.register(child.stdout, selectors.EVENT_READ)
    patience = 120.0  # until the folders are made; after that a mutant is told of every few seconds
    start = number
    while ready.select(patience):
        line = child.stdout.readline()
        if not line.startswith("{"):
            break
        patience = 3.0 * SECONDS
        said = json.loads(line)
        tally.counts[said["kind"]] += 1
        tally.seconds += said["seconds"]
        if said["kind"] == WRONG:
            tally.wrong.append(f"mutant {number}: {said['what']}")
        number += 1
    child.kill()
    child.communicate()
    errors.seek(0)
    said_last = errors.read()[-3000:]
    errors.close()
    if number == start and "Traceback" in said_last:
        raise RuntimeError(f"the folders could not be made:\n{said_last}")
    if number < end:
        tally.counts[WRONG] += 1
        tally.wrong.append(f"mutant {number}: the process hung or died ({child.returncode}) {said_last[-300:]}")
        number += 1
    return number


class Watch:
    """An audit hook: Python tells it of imports, of code that is run, of files that are opened, before they happen."""

    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "tempfile.", "pickle.", "urllib.", "marshal.")
    HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    @contextmanager
    def __call__(self) -> Iterator[list[str]]:
        self.seen, self.is_on = [], True
        try:
            yield self.seen
        finally:
            self.is_on = False

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or not self._matters(event, args):
            return
        self.is_on = False  # what is said here may itself import
        self.seen.append(f"{event} {str(args)[:200]}")
        self.is_on = True

    def _matters(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "import":
            return args[0] not in sys.modules
        if event == "open":
            return bool(isinstance(args[2], int) and args[2] & self.WRITES) and args[0] != os.devnull
        if event == "exec":
            # torch.fx reads the types in the schemas of torch's own operators.
            return not sys._getframe(2).f_code.co_filename.endswith("torch/fx/operator_schemas.py")
        return event.startswith(self.FORBIDDEN) and event not in self.HARMLESS


class OutOfTimeError(BaseException):
    """Raised by the clock, past every `except Exception`."""


def _ring(*_: object) -> None:
    raise OutOfTimeError


def _attempt(saved: Any, number: int, seed: int, watch: Watch, mark: Path) -> dict[str, Any]:
    from tests.hostile.artefact_mutants import Mutator, restore

    restore(saved)
    mutator = Mutator(saved, random.Random(f"{seed}/{number}"), str(mark))
    may_load = mutator.mutate()
    before = {path.name: path.lstat().st_mtime_ns for path in saved.folder.parent.rglob("*")}
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with watch() as seen:
            kind, what = _load(saved, may_load)
    except OutOfTimeError:
        kind, what = WRONG, "took too long"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if seen:
        kind, what = WRONG, f"did {seen[:3]} ({what})"
    if mark.exists() or before != {path.name: path.lstat().st_mtime_ns for path in saved.folder.parent.rglob("*")}:
        kind, what = WRONG, f"wrote a file ({what})"
        mark.unlink(missing_ok=True)
    what = f"{saved.folder.name}: {'; '.join(mutator.said)}: {what}"
    return {"kind": kind, "what": what, "seconds": time.perf_counter() - start}


def _load(saved: Any, may_load: bool) -> tuple[str, str]:
    from recoup import RecoupError

    try:
        model = saved.load()
        if not saved.is_right(model):
            return WRONG, "it computes something else"
        return (RIGHT, "") if may_load else (WRONG, "damage was not noticed")
    except RecoupError as error:
        return (REFUSED, str(error)) if len(str(error)) > 20 else (WRONG, f"an error that says nothing: {error}")
    except Exception as error:  # the law
        return WRONG, f"raw {type(error).__name__}: {str(error)[:200]}"


def main(seed: int, first: int, end: int) -> None:
    """What the child does: it tells of each mutant on a line of its own."""
    import torch

    from tests.hostile.artefact_folders import save_all

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as place:
        folders = save_all(Path(place))
        for saved in folders:  # whatever is imported at a first load is imported now
            assert saved.is_right(saved.load())
        watch = Watch()
        signal.signal(signal.SIGALRM, _ring)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        for number in range(first, end):
            said = _attempt(folders[number % len(folders)], number, seed, watch, Path(place) / "mark")
            print(json.dumps(said), file=told, flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))
