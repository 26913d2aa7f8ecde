"""One network through `recoup.prune`, as a user calls it: random inputs, half of the MACs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

import recoup
from benchmarks.zoo.counting import SAMPLES, Observed, observe
from benchmarks.zoo.process import peak_memory
from benchmarks.zoo.reach import locks_of, span_of
from benchmarks.zoo.rows import LONGEST, CopiesRow, PrunedRow, Setting, brief
from benchmarks.zoo.seconds import timed
from benchmarks.zoo.spec import Spec
from recoup.errors import BudgetError

Watched = TypeVar("Watched", PrunedRow, CopiesRow)
BATCH = 16  # samples of a calibration batch
AGREES = 0.01  # of torch's count of MACs, ours may differ by so much


def examine(spec: Spec, method: str, setting: Setting) -> PrunedRow:
    """What the method makes of a network on random inputs."""
    return watched(lambda seconds: _examine(spec, method, setting, seconds), spec.device)


def watched(work: Callable[[dict[str, float]], Watched], device: str) -> Watched:
    """The row that `work` makes, with its seconds, the peak of the device's memory and warnings."""
    seconds: dict[str, float] = {}
    warned: list[str] = []
    before = peak_memory(device)
    with timed(seconds, "total"), noted(warned):
        row = work(seconds)
    return replace(row, seconds=seconds, warned=tuple(dict.fromkeys(warned)), memory=peak_memory(device) - before)


@contextmanager
def noted(warned: list[str]) -> Iterator[None]:
    """Put down what Recoup warns of in the block."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", recoup.RecoupWarning)
        yield
    warned += [str(one.message)[:LONGEST] for one in found]


def _examine(spec: Spec, method: str, setting: Setting, seconds: dict[str, float]) -> PrunedRow:
    model, batches = spec.build(), spec.batches(setting.samples, BATCH)
    before = observe(model, spec.example(1), 1)
    row = PrunedRow("refused", setting=setting, macs=before.macs)

    def prune(budget: recoup.Budget) -> recoup.Result:
        with timed(seconds, "prune"):
            return recoup.prune(model, batches, budget=budget, method=method)

    try:
        row, budget = _aimed(row, model, batches[0], seconds, keep_class=False)
        try:
            result = prune(budget)
        except BudgetError:  # what a standalone graph could lose is out of reach where none serves
            row, budget = _aimed(row, model, batches[0], seconds, keep_class=True)
            result = prune(budget)
    except recoup.RecoupError as error:
        return replace(row, why=brief(error))
    return _judged(result, model, spec, before, row)


def _aimed(
    row: PrunedRow, model: nn.Module, example: Any, seconds: dict[str, float], *, keep_class: bool
) -> tuple[PrunedRow, recoup.Budget]:
    """What is locked, and the goal that this leaves."""
    with timed(seconds, "trace"):
        traced = recoup.trace(model, example, keep_class=keep_class)
    locks, span = locks_of(traced.structure), span_of(traced)
    row = replace(row, locked=locks.share, reasons=locks.reasons, goal=span.named)
    return row, recoup.Budget(macs=span.goal / max(1, span.most))


def _judged(result: recoup.Result, model: nn.Module, spec: Spec, before: Observed, row: PrunedRow) -> PrunedRow:
    """`row` with what the report says, and what the smaller model costs and returns while it runs."""
    report = result.report
    row = replace(
        row,
        result="pruned",
        form="class" if result.plan.graph is None else "graph",
        error=min(report.held_out.values(), default=None),
        difference=report.proof.difference,
        said=report.before.macs,
        left=report.after.macs,
    )
    try:
        after = observe(result.model, spec.example(1), 1)
        several = observe(result.model, spec.example(SAMPLES), SAMPLES)
    except Exception as error:  # a size of the calibration batches that stayed in it
        return replace(row, result="forward crashes", why=brief(error))
    agree = _agree(report.before.macs, before.macs) and _agree(report.after.macs, after.macs)
    return replace(
        row,
        kept=after.macs / max(1, before.macs),
        same_shapes=several.shapes == observe(model, spec.example(SAMPLES), SAMPLES).shapes,
        counted={} if agree else before.by_operation,
    )


def _agree(said: int, counted: int) -> bool:
    return abs(said - counted) <= AGREES * counted
