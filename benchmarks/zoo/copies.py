"""The law of copies for whole networks: half of every group are copies of the other half, so half of it is enough.

Who makes a channel and who reads it is what Recoup found out. What makes a channel, or changes it on its own, is
copied: rows of weights, biases, parameters and buffers of norms. Who reads it keeps its weights. A network in which
nobody reads a copy, but twice what it is a copy of, computes the same: that shows that they are copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.fuzz.comparison import relative_error
from tests.fuzz.copies import install
from torch import nn

import recoup
from benchmarks.zoo.pruned import BATCH, watched
from benchmarks.zoo.reading import Batch, call
from benchmarks.zoo.rows import LOST, CopiesRow, Setting, brief
from benchmarks.zoo.seconds import timed
from benchmarks.zoo.spec import Spec

NEW, LOOK = 1_000, 8  # seed and number of the inputs that nothing was fitted to
ALIKE = 5e-5  # of the spread of the outputs; what float32 makes of another order of additions


def examine(spec: Spec, method: str, setting: Setting) -> CopiesRow:
    """What a network of copies loses at half its width."""
    return watched(lambda seconds: _examine(spec, method, setting, seconds), spec.device)


def _examine(spec: Spec, method: str, setting: Setting, seconds: dict[str, float]) -> CopiesRow:
    model, batches = spec.build(), spec.batches(setting.samples, BATCH)
    row, apart = CopiesRow("refused", setting=setting), []

    def is_same(merged: nn.Module) -> bool:
        apart.append(_error(model, merged, spec.example(LOOK)))
        return apart[-1] <= ALIKE

    try:
        with timed(seconds, "install"):
            widths = install(model, lambda model: recoup.trace(model, batches[0]), is_same)
        row = replace(row, apart=apart[-1] if apart else None)
        if widths is None:
            return replace(row, result="no copies", why=_why_none(apart))
        with timed(seconds, "prune"):
            goal = _goal(recoup.trace(model, batches[0]), widths)
            result = recoup.prune(model, batches, method=method, **goal)
    except recoup.RecoupError as error:
        return replace(row, why=brief(error))
    row = replace(row, goal="half" if "budget" in goal else "widths")
    # What a channel does that was constant on all inputs seen is not known on others, and the report says so.
    is_known = not any(group.gone for group in result.report.constant.values())
    inputs = [spec.example(LOOK, NEW)] if is_known else batches
    lost = max(_error(model, result.model, batch) for batch in inputs)
    return _judged(result, replace(row, inputs="new" if is_known else "seen", error=lost))


def _why_none(apart: list[float]) -> str:
    if not apart:
        return "no group has two channels of a kind"
    return f"the network tells copies apart: {min(apart):.0e} of the spread of its outputs"


def _goal(traced: recoup.Traced, widths: dict[str, int]) -> dict[str, Any]:
    """Half of every width; where that is not what is enough, the widths that are."""
    halves = all(2 * widths[group.name] == group.width for group in traced.structure.prunable)
    return {"budget": recoup.Budget(width=0.5)} if halves else {"widths": widths}


def _judged(result: recoup.Result, row: CopiesRow) -> CopiesRow:
    assert row.error is not None
    gone = sum(int((~keep).sum()) for keep in result.plan.keep.values())
    channels = sum(len(keep) for keep in result.plan.keep.values())
    return replace(row, result="kept" if row.error <= LOST else "lost", gone=gone, channels=channels)


@torch.no_grad()
def _error(model: nn.Module, other: nn.Module, batch: Batch) -> float:
    return relative_error(call(model.eval(), batch), call(other.eval(), batch))
