"""The whole pipeline on one screen: trace, split, calibrate, rank, allocate, recover, apply, verify, report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from recoup.allocation.goal import Goal
from recoup.artefact.samples import first_samples
from recoup.artefact.tree import class_name
from recoup.artefact.writing import save
from recoup.channels.patterns import widths_by_group
from recoup.config import Budget, Method, require_progress
from recoup.errors import CaptureError, InputError, LockedError, warn
from recoup.graph.copies import working_copy
from recoup.graph.modes import one_at_a_time
from recoup.graph.settings import without_cache
from recoup.graph.standalone import entering
from recoup.inputs.batches import Inputs, Stream, device_of, inputs_of
from recoup.inputs.models import require_model
from recoup.inputs.resources import MemoryWatch
from recoup.inputs.split import split
from recoup.inputs.surroundings import undisturbed
from recoup.judge.accuracy import Evaluate
from recoup.methods.registry import (
    acceptance_for,
    allocate,
    find_method,
    recover,
    require_possible,
    require_served,
    runnable,
)
from recoup.plan import Plan
from recoup.progress import Clock, Progress, silent
from recoup.report.content import Report
from recoup.report.inspection import Inspection, inspect_structure
from recoup.report.making import make_report, noted, score_of
from recoup.statistics.calibrate import calibrate
from recoup.statistics.rank import rank
from recoup.statistics.rotation import after, rotated, rotation
from recoup.surgery.apply import apply
from recoup.surgery.verify import agree, require_real_outputs, verify
from recoup.tracing.configured import rebuilt
from recoup.tracing.own_class import class_is_enough
from recoup.tracing.preparation import require_idle
from recoup.tracing.terms import Terms
from recoup.tracing.trace import Traced, in_own_class, trace, traced_for


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The smaller model, the plan that makes it from the original, and the report.

    A saved result is checked when it is loaded: by a few calibration `samples`, and the class of the `original`.
    """

    model: nn.Module
    plan: Plan
    report: Report
    samples: Inputs | None = None
    original: str | None = None

    def save(self, folder: str | Path, *, source: str | None = None) -> Path:
        """Write plan, weights and report into a new folder; `source` names where the original model comes from."""
        samples, original = self.samples, self.original
        return save(folder, self.model, self.plan, self.report, source=source, samples=samples, original=original)


@one_at_a_time
@undisturbed
def prune(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    evaluate: Evaluate | None = None,
    tolerance: float | None = None,
    budget: Budget | None = None,
    widths: Mapping[str, int] | None = None,
    min_width: int = 1,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    method: str | Method = "best",
    keep_class: bool | None = None,
    keep_config: bool = False,
    streams: bool = False,
    progress: Progress = silent,
) -> Result:
    """A smaller model that does what `model` does, without retraining; `model` itself is not changed.

    Give either `tolerance`, in points of the validation accuracy or of `evaluate(model)`, or a `budget`; `widths` by
    hand may stand alone.

    Args:
        model: any module that `torch.export` captures; its device is where the work happens.
        calibration: batches of inputs, labels not needed; a fifth of them is held out to judge the fits by.
        validation: batches on which the tolerance is measured: accuracy if they carry labels, otherwise agreement with
            the original; without it, agreement on the held-out calibration images.
        evaluate: measures a model in points, higher is better; in the place of `validation`.
        tolerance: how many points may be lost.
        budget: what share of the MACs, the parameters, every width or the time of the first calibration batch to keep.
        widths: channels to keep of some groups, by the name of the group or of a layer that makes it; with a tolerance
            or a budget the others are decided as usual, without either they stay whole.
        min_width: the fewest channels that a group keeps; `widths` may go below it.
        only: names of the groups or modules that may be pruned, with wildcards; all of them if empty.
        exclude: names of those that may not.
        method: `recoup.Best()`, `Fast()`, `Paper()`, `Released()`, or one of their names.
        keep_class: True locks what the model's own class cannot hold at another size; False returns a standalone graph
            if there is any such channel; None does so only if the class alone leaves little to choose.
        keep_config: prune only what the `config` of a model can tell, equally in all layers, so that its class can be
            built from that config again, as `from_pretrained` does.
        streams: turn residual streams under LayerNorm or RMSNorm into their principal components, as `recoup.rotate`
            does, and prune them too; `calibration` is then read twice.
        progress: called with the stage, the steps done and their number.
    """
    method = find_method(method)
    goal = Goal(tolerance, budget, validation, evaluate, {} if widths is None else widths, min_width)
    require_possible(goal, method)
    require_model(model)
    require_progress(progress)
    asked: dict[str, Any] = {"keep_class": keep_class, "keep_config": keep_config, "streams": streams}
    terms = Terms.of(**asked, untie=budget is None or budget.of != "parameters", only=only, exclude=exclude)
    clock, watch = Clock(), MemoryWatch(device_of(model))
    with clock("trace"):
        batches = Stream(calibration)
        turned = rotation(model, batches.first, batches.again()) if streams else None
        given, model = model, model if turned is None else rotated(model, turned, batches.first)
        traced = _prunable(model, batches.first, goal, terms)
        model = traced.standalone.model  # a copy, from here on
        widths_by_group(traced.structure, goal.widths)  # a name that does not exist is refused before the work
        method = runnable(method, traced, goal)
    with clock("split"):
        data = split(model, batches, held_out=method.holds_out, serves=traced.serves)
        require_served(method, traced, data)
    with clock("measure"):
        acceptance = acceptance_for(given, goal, method, data)
    with clock("calibrate"):
        are_scores = acceptance is not None and acceptance.what == "accuracy"
        seen = calibrate(traced, data, method, progress, are_scores=are_scores)
    with clock("rank"):
        rankings = rank(seen, progress)
    with clock("allocate"):
        allocation = allocate(seen, rankings, goal, acceptance, progress)
    with clock("recover"):
        recovered = recover(seen, allocation, progress)
    with clock("apply"):
        smaller = apply(model, recovered.plan)
    with clock("verify"):
        proof = verify(model, recovered.plan, smaller, data.first)
        if traced.form is not None:
            agree(model, traced.form.host, data.first)
        if keep_config:
            agree(without_cache(working_copy(smaller)), without_cache(rebuilt(smaller)), data.first)
    with clock("measure"):
        score = score_of(working_copy(smaller) if traced.state else smaller, allocation, recovered, acceptance)
    peak = watch.peak()
    report = make_report(seen, allocation, recovered, smaller, proof, score, clock.seconds, rankings, peak)
    for warning in report.warnings:
        warn(warning)
    plan = recovered.plan if turned is None else after(turned, recovered.plan, given)
    return Result(smaller, plan, noted(report, plan), first_samples(data.first), class_name(type(model)))


@undisturbed
def inspect(
    model: nn.Module,
    example: Any,
    *,
    keep_class: bool = False,
    keep_config: bool = False,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> Inspection:
    """A dry run: groups, widths, costs, what is locked and why. Print it."""
    traced = trace(model, example, keep_class=keep_class, keep_config=keep_config, only=only, exclude=exclude)
    return inspect_structure(model, traced.structure)


def _prunable(model: nn.Module, example: Any, goal: Goal, terms: Terms) -> Traced:
    """The structure to work on: that of the standalone form only where it gains, and if one graph serves the batches.

    Raises:
        LockedError: nothing can be pruned.
    """
    traced, call = traced_for(model, example, terms), inputs_of(example, model).to(device_of(model))
    own = in_own_class(traced) if terms.keep_class is None and traced.form is not None else None
    try:
        if own is not None and class_is_enough(own, traced, goal.budget, goal.widths):
            traced = own
        if traced.form is not None:
            entering(traced.form.host, call.args, call.kwargs)
    except (CaptureError, InputError) as error:
        warn(f"only what the model's own class holds is pruned: {error}")
        traced = in_own_class(traced) if own is None else own
    require_real_outputs(traced.standalone.original)
    if traced.idle:
        require_idle(traced.standalone.model, traced.idle, call)
    if traced.structure.prunable:
        return traced
    reasons = {reason: None for group in traced.structure.groups for reason in group.reasons}
    raise LockedError(
        f"nothing in {type(model).__name__} can be pruned, all {len(traced.structure.groups)} groups of channels are "
        f"locked: {'; '.join(list(reasons)[:5]) or 'no layer reads another'}. `recoup.inspect` lists them all."
    )
