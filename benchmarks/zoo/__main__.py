"""Which networks can be pruned, and how far: whole libraries of architectures, random weights.

    python -m benchmarks.zoo --suite torchvision --jobs 2
    python -m benchmarks.zoo --suite beyond --method fast best --samples 32 --seconds 120
    python -m benchmarks.zoo --suite timm --network densenet121 --method magnitude --again
    python -m benchmarks.zoo --table

Rows are written to benchmarks/results/zoo/SUITE.json as they come; what is there already is skipped unless --again.
`magnitude` is a cut without data, and its proof; `fast` and `best` are `recoup.prune` on random inputs; `fast-copies`
and `best-copies` are the same on networks that can lose half of their channels. `torch-pruning` is the other library.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from pathlib import Path

from benchmarks.zoo.rows import WAYS
from benchmarks.zoo.runner import Limits, in_a_process, preload, run
from benchmarks.zoo.store import Store, read
from benchmarks.zoo.suites import SUITES
from benchmarks.zoo.table import render, rewrite
from benchmarks.zoo.task import SAMPLES, Task

ROOT = Path(__file__).parent.parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "zoo", ROOT / "docs" / "architectures.md"
INSTALL = "pip install --no-deps -r benchmarks/zoo/requirements.txt"


def main() -> None:
    options = parse()
    if options.table:
        found = {suite: read(RESULTS / f"{suite}.json") for suite in SUITES}
        PAGE.write_text(rewrite(PAGE.read_text(), render(found)))
        return
    limits = Limits(options.seconds, options.memory, options.jobs)
    stores = {suite: Store(RESULTS / f"{suite}.json") for suite in options.suite}
    tasks = {suite: waiting(suite, store, options) for suite, store in stores.items()}
    preload(dict.fromkeys(task.library for mine in tasks.values() for task in mine))
    for suite, store in stores.items():
        run(tasks[suite], store, limits, in_a_process)


def waiting(suite: str, store: Store, options: argparse.Namespace) -> list[Task]:
    """What was asked for, can be made and is not done yet."""
    networks = SUITES[suite](options.size)
    libraries = {name: networks[name].library for name in networks if not options.network or name in options.network}
    there = {library: _is_there(library) for library in dict.fromkeys(libraries.values())}
    left_out = Counter(library.partition(".")[0] for library in libraries.values() if not there[library])
    for package, count in left_out.items():
        print(f"{count} networks of {package} are left out, which cannot be imported: {INSTALL}", file=sys.stderr)
    tasks = [
        Task(suite, name, way, options.samples, options.size, library, options.device)
        for way in options.method
        for name, library in libraries.items()
        if there[library]
    ]
    return [task for task in tasks if options.again or not store.has(task.name, task.way)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--network", nargs="+", help="only these")
    parser.add_argument("--method", nargs="+", choices=WAYS, default=["magnitude", "torch-pruning"])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="random inputs to calibrate on")
    parser.add_argument("--size", type=int, help="side of the images, for networks that read several sizes")
    parser.add_argument("--device", default="cpu", help="where networks run, such as cuda; not for torch-pruning")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="for one network in one way")
    parser.add_argument("--memory", type=float, default=0.0, help="GiB for one network; 0 for no limit")
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--table", action="store_true", help="only rewrite docs/architectures.md")
    options = parser.parse_args()
    if "torch-pruning" in options.method and not options.table and not _is_there("torch_pruning"):
        sys.exit(f"torch_pruning cannot be imported: {INSTALL}, or name another --method.")
    return options


def _is_there(library: str) -> bool:
    try:
        importlib.import_module(library)
    except Exception:  # whatever a broken installation raises
        return False
    return True


if __name__ == "__main__":
    main()
