"""`python -m tests.fuzz`: so many random networks, what became of each, and the smallest that break a law."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.fuzz.kinds import KINDS
from tests.fuzz.laws import Outcome, check
from tests.fuzz.networks import METHODS, Case, draw, parse
from tests.fuzz.shrink import shrink

FOLDER = Path("build/fuzz")
# A process is replaced after so many cases: what torch.export keeps would add up.
CASES_PER_PROCESS = 250
# Failures of one law that are made small; more of them rarely tell more.
SHRUNK_PER_LAW = 5


@dataclass
class Tally:
    """What became of the cases so far."""

    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    laws: Counter[str] = field(default_factory=Counter)
    pieces: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, Case, Outcome]] = field(default_factory=list)

    def add(self, number: int, case: Case, outcome: Outcome) -> None:
        """One more."""
        self.ends[outcome.end] += 1
        self.laws.update(list(outcome.broken))
        self.pieces.update({step.kind for step in case.steps})
        self.notes.update(set(outcome.notes))
        if outcome.refused is not None:
            self.refusals[reason(outcome.refused)] += 1
            self.examples.setdefault(reason(outcome.refused), number)
        if outcome.broken:
            self.failures.append((number, case, outcome))

    def __str__(self) -> str:
        count = max(1, self.ends.total())
        shares = ", ".join(f"{name} {n} ({n / count:.1%})" for name, n in self.ends.most_common())
        return f"{self.ends.total()} networks: {shares}"


def main(arguments: list[str] | None = None) -> int:
    """The number of failures, up to 1."""
    options = _options(arguments)
    torch.set_num_threads(1)
    if options.network:
        return _one(parse(options.network), small=options.shrink)
    seed = options.seed if options.seed is not None else int(time.time())
    print(f"seed {seed}, {options.count} networks, methods {', '.join(options.methods)}", flush=True)
    tally = Tally()
    began = time.monotonic()
    for number, case, outcome in _results(seed, options):
        tally.add(number, case, outcome)
        if outcome.broken:
            print(f"  network {number}: {'; '.join(f'{law}: {what}' for law, what in outcome.broken.items())[:300]}")
        if tally.ends.total() % 100 == 0:
            print(f"{tally}, {(time.monotonic() - began) / tally.ends.total():.2f} s each", flush=True)
    _print_tally(tally, time.monotonic() - began)
    _shrink_failures(seed, tally)
    print(named(seed, tally), flush=True)
    return 1 if tally.failures else 0


def reason(message: str) -> str:
    """What refusals for one cause have in common: the message without its names and numbers."""
    return re.sub(r"[\w.]*[._\d][\w.]*|\(.*?\)", "#", message)[:90]


def named(seed: int, tally: Tally) -> str:
    """The networks that broke a law, a line for each: what is left of a log that lost its beginning."""
    broken = [
        f"broken: seed {seed}, network {number}, {', '.join(outcome.broken)}"
        for number, _, outcome in sorted(tally.failures, key=lambda failure: failure[0])
    ]
    return "\n".join([f"{tally}; {len(broken)} of seed {seed} broke a law", *broken])


def run_one(seed: int, number: int, methods: tuple[str, ...]) -> tuple[int, Case, Outcome]:
    """A case by its number, in a process of its own."""
    torch.set_num_threads(1)
    case = draw(seed, number, methods)
    return number, case, check(case)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many networks")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--seed", type=int, help="of all that is drawn; the time if not given")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=METHODS, help="in rotation")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--network", help="check this one, as it was printed")
    parser.add_argument("--shrink", action="store_true", help="and look for a smaller one")
    return parser.parse_args(arguments)


def _results(seed: int, options: argparse.Namespace) -> Iterator[tuple[int, Case, Outcome]]:
    end = time.monotonic() + 60 * options.minutes
    numbers = (n for n in range(options.first, options.first + options.count) if time.monotonic() < end)
    while True:
        waiting: dict[Future[tuple[int, Case, Outcome]], int] = {}
        try:
            yield from _pooled(seed, numbers, waiting, options)
        except BrokenProcessPool:
            for number in waiting.values():
                yield _alone(seed, number, options)
        else:
            return


def _pooled(
    seed: int,
    numbers: Iterator[int],
    waiting: dict[Future[tuple[int, Case, Outcome]], int],
    options: argparse.Namespace,
) -> Iterator[tuple[int, Case, Outcome]]:
    """Results as they come; `waiting` are the numbers under way, for the case that a process dies."""
    with _pool(options.jobs) as pool:
        while True:
            for number in itertools.islice(numbers, 2 * options.jobs - len(waiting)):
                waiting[pool.submit(run_one, seed, number, options.methods)] = number
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                result = future.result()
                del waiting[future]
                yield result


def _alone(seed: int, number: int, options: argparse.Namespace) -> tuple[int, Case, Outcome]:
    """A case in a process that may die of it."""
    try:
        with _pool(1) as pool:
            return pool.submit(run_one, seed, number, options.methods).result()
    except BrokenProcessPool:
        return number, draw(seed, number, options.methods), Outcome({"crash": "the process died"})


def _pool(jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, max_tasks_per_child=CASES_PER_PROCESS)


def _print_tally(tally: Tally, seconds: float) -> None:
    print(f"\n{tally}, {seconds / max(1, tally.ends.total()):.2f} s each")
    print("what they were: " + ", ".join(f"{name} {count}" for name, count in tally.notes.most_common()))
    print(f"pieces: {len(tally.pieces)} of {len(KINDS)} kinds, the rarest {tally.pieces.most_common()[-3:]}")
    for name, count in tally.refusals.most_common(20):
        print(f"  refused {count:5}  {name} (first: network {tally.examples[name]})")
    for name, count in tally.laws.most_common():
        print(f"  broken  {count:5}  {name}")


def _shrink_failures(seed: int, tally: Tally) -> None:
    tried: Counter[str] = Counter()
    for number, case, outcome in tally.failures:
        for law in outcome.broken:
            tried[law] += 1
            if tried[law] <= SHRUNK_PER_LAW and law != "crash":  # which would end this process too
                _report(f"{seed}-{number}", law, shrink(case, law, check))


def _report(name: str, law: str, case: Case) -> None:
    """Print a small failure, and write it where it can be found again."""
    what = check(case).broken.get(law, "not broken any more")
    text = f"{law}: {what}\n{describe(case)}\n  {command(case)}\n"
    print("\n" + text, flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}-{law.replace(' ', '-')}.txt").write_text(text)


def describe(case: Case) -> str:
    """A case in lines."""
    lines = [f"  {case.stem} -> 8 channels"]
    for step in case.steps:
        options = ", ".join(f"{name}={value!r}" for name, value in step.options.items())
        lines.append(f"  {'' if step.wrap == 'none' else step.wrap + ' '}{step.kind}({options})")
    asked = [f"method={case.method!r}", f"cut={case.cut!r}", *(["keep_class"] if case.keep_class else [])]
    return "\n".join([*lines, f"  {case.head} head, {case.output} output; {', '.join(asked)}"])


def command(case: Case) -> str:
    """What repeats it."""
    return f"python -m tests.fuzz --network {shlex.quote(str(case))}"


def _one(case: Case, *, small: bool) -> int:
    outcome = check(case)
    print(f"{describe(case)}\n{outcome.end}: {outcome.refused or ''} {', '.join(outcome.notes)}")
    for law, what in outcome.broken.items():
        print(f"{law}: {what}")
        if small:
            _report("one", law, shrink(case, law, check))
    return 1 if outcome.broken else 0
