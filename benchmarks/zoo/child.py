"""One network in one way, in a process that the one with all libraries forks: what it does there."""

from __future__ import annotations

import dataclasses
import json
import traceback
import warnings
from pathlib import Path

import torch

from benchmarks.zoo.process import limit_memory, machine
from benchmarks.zoo.rows import CopiesRow, PrunedRow, Row, Setting, Way, brief, failed, to_json
from benchmarks.zoo.spec import Spec
from benchmarks.zoo.suites import SUITES
from benchmarks.zoo.task import Task


def work(task: Task, gibibytes: float, threads: int | None, file: Path) -> None:
    """Write the row of a task."""
    warnings.simplefilter("ignore")
    if threads is not None:
        torch.set_num_threads(threads)
    limit_memory(gibibytes)
    spec = dataclasses.replace(SUITES[task.suite](task.size)[task.name], device=task.device)
    file.write_text(json.dumps(to_json(examine(task.way, spec, task.samples))))


def examine(way: Way, spec: Spec, samples: int) -> Row:
    """The row of one network; an error becomes a row too, and its traceback goes to stderr."""
    setting = Setting(samples, spec.size, machine(spec.device))
    try:
        return _examine(way, spec, setting)
    except Exception as error:
        traceback.print_exc()
        row = failed(way, "crash", brief(error))
        return dataclasses.replace(row, setting=setting) if isinstance(row, (PrunedRow, CopiesRow)) else row


def _examine(way: Way, spec: Spec, setting: Setting) -> Row:
    """What the way makes of it; imported here, so that none needs what another does."""
    if way == "magnitude":
        from benchmarks.zoo import magnitude

        return magnitude.examine(spec)
    if way == "torch-pruning":
        from benchmarks.zoo import theirs

        return theirs.examine(spec)
    method, _, copied = way.partition("-")
    if copied:
        from benchmarks.zoo import copies

        return copies.examine(spec, method, setting)
    from benchmarks.zoo import pruned

    return pruned.examine(spec, method, setting)
