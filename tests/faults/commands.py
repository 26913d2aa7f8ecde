"""The command line as a process of its own, to be ended at any moment or run on a disk that is full."""

import functools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

ARGUMENTS = ("prune", "recoup:digits", "--calibration", "noise:100", "--macs", "0.5", "--method", "fast")
# So few bytes of activations may wait in memory that some of them are on disk.
MEMORY = 200_000
FILES = {"plan.json", "model.safetensors", "report.json", "report.html"}


@dataclass(frozen=True)
class Place:
    """Where a command writes: its result, and its temporary files."""

    output: Path
    temporary: Path

    @property
    def leftovers(self) -> list[Path]:
        """What is there besides a result."""
        beside = [path for path in self.output.parent.iterdir() if path not in (self.output, self.temporary)]
        return beside + list(self.temporary.iterdir())


@contextmanager
def new_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        yield Place(Path(folder) / "out", temporary)


class Command:
    """`recoup` with some arguments, in a process that has everything imported already."""

    def __init__(self, place: Place, *more: str, output: Path | None = None, limit: int = 0, result: str = "") -> None:
        """Files may grow to `limit` bytes, if there is one; what is a result goes to the file `result`."""
        self._log = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  # closed in `finish`
        arguments = [*ARGUMENTS, "--output", str(output or place.output), *more]
        given = arguments, place.temporary, limit, result or self._log.name, self._log.name
        self._process = _server().Process(target=_run, args=given)
        self._process.start()
        self._began = time.perf_counter()

    def send(self, kind: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid or 0, kind)

    def finish(self) -> tuple[int | None, str]:
        """Exit code, and all that was said."""
        self._process.join(120)
        if self._process.is_alive():
            self._process.kill()
        with self._log:
            return self._process.exitcode, self._log.read()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


@functools.cache
def _server() -> Any:
    """A process that has imported everything and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["recoup.cli", "recoup.recovery.twin_run", "torch.export", "torch._dynamo"])
    return context


def _run(arguments: list[str], temporary: Path, limit: int, result: str, log: str) -> None:
    from recoup.cli import main
    from recoup.recovery import twin_run

    for number, path in ((1, result), (2, log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    torch.set_num_threads(1)
    twin_run.resident_of = lambda device: MEMORY  # type: ignore[assignment]
    main(arguments)


def is_complete(folder: Path) -> bool:
    """Whether a result is there with all of its files, and its weights can be read."""
    if not {path.name for path in folder.iterdir()} >= FILES:
        return False
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return all(bool(weights.get_tensor(name).isfinite().all()) for name in weights.keys())  # noqa: SIM118


def seconds_needed() -> float:
    """How long the command works; the second time, as the first one also starts the process that forks."""
    for _ in range(2):
        with new_place() as place:
            command = Command(place)
            code, said = command.finish()
            assert code == 0, said
            assert is_complete(place.output)
            seconds = command.seconds
    return seconds


def end_at(moment: float, kind: signal.Signals, *, goes_on: bool = True) -> str:
    """Nothing, or what was wrong after the command was sent a signal so many seconds after its start.

    Where it `goes_on`, another command is run to its end in the same place.
    """
    with new_place() as place:
        command = Command(place)
        time.sleep(moment)
        command.send(kind)
        code, said = command.finish()
        if place.output.exists() and not is_complete(place.output):
            return f"half a result after {moment:.3f} s"
        if code not in (0, -kind, 128 + kind) or "Traceback" in said:
            start = max(0, said.find("Traceback") - 300)
            return f"exit code {code} after {moment:.3f} s: {said[start : start + 3000]}"
        if any(place.temporary.iterdir()):
            return f"temporary files after {moment:.3f} s: {list(place.temporary.iterdir())}"
        if kind is signal.SIGTERM and place.leftovers:
            return f"left after {moment:.3f} s: {place.leftovers}"
        return _next_run(place, moment) if goes_on else ""


def _next_run(place: Place, moment: float) -> str:
    shutil.rmtree(place.output, ignore_errors=True)
    code, said = Command(place, "--method", "paper").finish()
    if code or not is_complete(place.output) or place.leftovers:
        return f"the run after one that ended at {moment:.3f} s failed: {said[-500:]}"
    return ""


def moments(count: int, seed: int, longest: float) -> list[tuple[float, signal.Signals]]:
    """Random moments, kill -9 and SIGTERM in turn; a third of them near the end, when the result is written."""
    draw = random.Random(seed)
    kinds = [signal.SIGKILL, signal.SIGTERM]
    spans = [(0.0, 1.0), (0.0, 1.0), (0.8, 1.05)]
    return [(longest * draw.uniform(*spans[number % 3]), kinds[number % 2]) for number in range(count)]
