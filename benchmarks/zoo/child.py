"""One network, one side, in a process of its own: `python -m benchmarks.zoo.child SUITE NETWORK SIDE GIB FILE`."""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path

from benchmarks.zoo.rows import SIDES, Row, Side, brief, failed, to_json
from benchmarks.zoo.suites import SUITES, Spec


def main() -> None:
    suite, name, chosen, memory, file = sys.argv[1:]
    side = next(side for side in SIDES if side == chosen)
    warnings.simplefilter("ignore")
    limit_memory(float(memory))
    Path(file).write_text(json.dumps(to_json(examine(side, SUITES[suite]()[name]))))


def examine(side: Side, spec: Spec) -> Row:
    """The row of one network; an error becomes a row too."""
    try:
        if side == "ours":
            from benchmarks.zoo import ours  # here, so that either side runs without what the other needs

            return ours.examine(spec)
        from benchmarks.zoo import theirs

        return theirs.examine(spec)
    except Exception as error:
        return failed(side, "crash", brief(error))


def limit_memory(gibibytes: float) -> None:
    """More than this raises instead of taking the machine down; 0 for no limit."""
    if gibibytes:
        size = int(gibibytes * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


if __name__ == "__main__":
    main()
