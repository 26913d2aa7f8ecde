"""Which networks can be pruned, and how far: whole libraries of architectures, random weights, no data.

    python -m benchmarks.zoo --suite torchvision --jobs 2
    python -m benchmarks.zoo --suite timm --network densenet121 --side ours --again
    python -m benchmarks.zoo --table

Rows are written to benchmarks/results/zoo/SUITE.json as they come; what is there already is skipped unless --again.
`--side theirs` is Torch-Pruning: pip install --no-deps torch-pruning==1.6.1.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from benchmarks.zoo.rows import SIDES
from benchmarks.zoo.runner import Limits, Task, in_a_process, run
from benchmarks.zoo.store import Store, read
from benchmarks.zoo.suites import SUITES
from benchmarks.zoo.table import render, rewrite

ROOT = Path(__file__).parent.parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "zoo", ROOT / "docs" / "architectures.md"


def main() -> None:
    options = parse()
    if options.table:
        found = {suite: read(RESULTS / f"{suite}.json") for suite in SUITES}
        PAGE.write_text(rewrite(PAGE.read_text(), render(found)))
        return
    limits = Limits(options.seconds, options.memory, options.jobs)
    for suite in options.suite:
        store = Store(RESULTS / f"{suite}.json")
        run(waiting(suite, store, options), store, limits, in_a_process)


def waiting(suite: str, store: Store, options: argparse.Namespace) -> list[Task]:
    """What was asked for and is not done yet."""
    names = [name for name in SUITES[suite]() if not options.network or name in options.network]
    tasks = [Task(suite, name, side) for name in names for side in options.side]
    return [task for task in tasks if options.again or not store.has(task.name, task.side)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--network", nargs="+", help="only these")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="for one network and one side")
    parser.add_argument("--memory", type=float, default=0.0, help="GiB for one network; 0 for no limit")
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--table", action="store_true", help="only rewrite docs/architectures.md")
    options = parser.parse_args()
    if "theirs" in options.side and not options.table and importlib.util.find_spec("torch_pruning") is None:
        sys.exit("torch_pruning is not installed: pip install --no-deps torch-pruning==1.6.1, or add --side ours.")
    return options


if __name__ == "__main__":
    main()
