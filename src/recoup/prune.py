"""The whole method on one page: trace, calibrate, select, search, recover, apply, prove."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from recoup.artefact import save
from recoup.batches import Stream, device_of, inputs_of
from recoup.calibrate import Calibration
from recoup.errors import CaptureError, LockedError
from recoup.evaluate import Evaluate
from recoup.goal import Goal
from recoup.methods import judge_for, method_for
from recoup.plan import Plan
from recoup.progress import Progress, silent
from recoup.recover import select
from recoup.report.content import Report, group_rows
from recoup.report.inspection import Inspection, inspect_structure
from recoup.settings import Budget, Settings, find_preset
from recoup.structure.cost import Cost, cost
from recoup.structure.trace import Traced, trace_inputs
from recoup.structure.verify import agree, prove


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The smaller model, the plan that makes it from the original, and the report."""

    model: nn.Module
    plan: Plan
    report: Report

    def save(self, folder: str | Path, *, source: str | None = None) -> Path:
        """Write plan, weights and report into a new folder; `source` names where the original model comes from."""
        return save(folder, self.model, self.plan, self.report, source=source)


def prune(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    evaluate: Evaluate | None = None,
    tolerance: float | None = None,
    budget: Budget | None = None,
    preset: str | Settings = "best",
    refine: float = 0.0,
    keep_class: bool = False,
    progress: Progress = silent,
) -> Result:
    """A smaller model that does what `model` does, without retraining; `model` itself is not changed.

    Give either `tolerance`, in points of the validation accuracy or of `evaluate(model)`, or a `budget`.

    Args:
        model: any module that `torch.export` captures; its device is where the work happens.
        calibration: batches of inputs, labels not needed; a fifth of them is held out to judge the fits by.
        validation: batches on which the tolerance is measured: accuracy if they carry labels, otherwise agreement with
            the original; without it, agreement on the held-out calibration images.
        evaluate: measures a model in points, higher is better; in the place of `validation`.
        tolerance: how many points may be lost.
        budget: what share of the MACs, the parameters, every width or the time of the first calibration batch to keep.
        preset: a preset's name, "best", "fast", "paper" or "released", or settings of your own.
        refine: seconds of gradient steps towards the original's outputs at the end; off by default.
        keep_class: lock what the model's own class cannot hold at another size, rather than return a standalone graph.
        progress: called with the stage, the steps done and their number.
    """
    settings = find_preset(preset) if isinstance(preset, str) else preset
    goal = Goal(tolerance, budget, validation, evaluate, refine, settings)
    clock = _Clock()
    with clock("trace"):
        batches = Stream(calibration)
        traced = _usable(model, batches.first, keep_class=keep_class)
        _require_prunable(model, traced)
    with clock("measure"):
        judge = judge_for(model, goal)
    with clock("calibrate"):
        method = method_for(model, traced, batches, goal, judge, progress)
        seen = method.seen
    with clock("select"):
        rankings = select(seen, progress=progress)
    with clock("search"):
        keep, found = method.decide(rankings)
    with clock("recover"):
        chosen = method.recover(keep)
    with clock("prove"):
        smaller, proof = prove(model, chosen.plan, traced.inputs)
        if traced.form is not None:
            agree(model, traced.form.host, traced.inputs)
    with clock("measure"):
        score = method.score(smaller, found)
    before, after = _costs(model, smaller, seen, keep)
    report = Report(
        network=type(model).__name__,
        before=before,
        after=after,
        groups=group_rows(seen.structure, keep),
        recovery=chosen.plan.recovery,
        proof=proof,
        samples=seen.samples,
        score=score,
        seconds=clock.seconds,
        settings=_described(seen.settings),
        form=None if traced.form is None else traced.form.reason,
        held_out=chosen.harms,
        latency=method.latency,
    )
    for warning in report.warnings:
        warnings.warn(warning, stacklevel=2)
    return Result(smaller, chosen.plan, report)


def _usable(model: nn.Module, example: Any, *, keep_class: bool) -> Traced:
    """The structure to work on: that of the standalone form only if one graph serves every batch size."""
    traced = trace(model, example, keep_class=keep_class)
    try:
        traced.host(model)
    except CaptureError as error:
        warnings.warn(f"only what the model's own class holds is pruned: {error}", stacklevel=3)
        return trace(model, example, keep_class=True)
    return traced


def trace(model: nn.Module, example: Any, *, keep_class: bool = False) -> Traced:
    """The structure of `model`: its channel groups, what is locked and why; `example` is one batch of inputs.

    With `keep_class`, what the model's own class cannot hold at another size is locked.
    """
    return trace_inputs(model, inputs_of(example, model).to(device_of(model)), keep_class=keep_class)


def inspect(model: nn.Module, example: Any, *, keep_class: bool = False) -> Inspection:
    """A dry run: groups, widths, costs, what is locked and why. Print it."""
    return inspect_structure(model, trace(model, example, keep_class=keep_class).structure)


def _require_prunable(model: nn.Module, traced: Traced) -> None:
    if traced.structure.prunable:
        return
    reasons = {reason: None for group in traced.structure.groups for reason in group.reasons}
    raise LockedError(
        f"nothing in {type(model).__name__} can be pruned, all {len(traced.structure.groups)} groups of channels are "
        f"locked: {'; '.join(list(reasons)[:5]) or 'no layer reads another'}. `recoup.inspect` lists them all."
    )


def _costs(model: nn.Module, smaller: nn.Module, seen: Calibration, keep: Tensor) -> tuple[Cost, Cost]:
    """Before and after; the parameters after are counted on the smaller model, which may have new biases."""
    after = cost(seen.structure, model, keep).macs
    return cost(seen.structure, model), Cost(after, sum(p.numel() for p in smaller.parameters()))


def _described(settings: Settings) -> dict[str, Any]:
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return getattr(value, "__name__", type(value).__name__) if callable(value) else value


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
