"""The report of a run, from what its stages have returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from recoup.algebra.selection import Ranking
from recoup.allocation.goal import Allocation
from recoup.channels.cost import Cost, cost
from recoup.channels.structure import named_tensors
from recoup.config import Method
from recoup.inputs.resources import PeakMemory
from recoup.judge.acceptance import Acceptance, Verdict, judged
from recoup.plan import Plan
from recoup.recovery.choose import Recovered
from recoup.report.content import ConstantChannels, DependentChannels, Report, Score, group_rows
from recoup.statistics.calibrate import Calibration
from recoup.statistics.constant import constant_channels
from recoup.surgery.comparison import Proof


def make_report(
    calibration: Calibration,
    allocation: Allocation,
    recovered: Recovered,
    smaller: nn.Module,
    proof: Proof,
    score: Score | None,
    seconds: Mapping[str, float],
    rankings: Mapping[str, Ranking] = MappingProxyType({}),
    memory: PeakMemory | None = None,
) -> Report:
    """The report of a run, from what its stages have returned."""
    structure, model, form = calibration.structure, calibration.model, calibration.traced.form
    # New biases count: parameters are those of the smaller model as it is.
    parameters = sum(p.numel() for p in smaller.parameters())
    after = dataclasses.replace(cost(structure, model, allocation.keep), parameters=parameters)
    return Report(
        network=type(model).__name__,
        before=_before(calibration),
        after=after,
        groups=group_rows(structure, allocation.keep),
        recovery=recovered.plan.recovery,
        proof=proof,
        samples=calibration.samples,
        score=score,
        seconds=seconds,
        method=described(calibration.method),
        form=None if form is None else form.said,
        held_out=recovered.errors,
        latency=allocation.latency,
        constant=_constant(calibration, allocation.keep),
        dependent=_dependent(calibration, rankings, allocation.keep),
        memory=memory,
        notes=_notes(calibration),
    )


def noted(report: Report, plan: Plan) -> Report:
    """The report with what the plan does to the model's own modules, besides cutting them."""
    if not plan.norms:
        return report
    many = f" and {len(plan.norms) - 1} more" if len(plan.norms) > 1 else ""
    said = f"{plan.norms[0]}{many}: RMSNorms that the code writes out; in the result they are torch's"
    return dataclasses.replace(report, notes=(*report.notes, said))


def _notes(calibration: Calibration) -> tuple[str, ...]:
    if not calibration.traced.standalone.given.caches:
        return ()
    after = "; a standalone graph has none" if calibration.traced.form is not None else ", and the result has it"
    return (f"the cache of keys and values (use_cache) was switched off to look at the model{after}",)


def _before(calibration: Calibration) -> Cost:
    """The cost of the caller's model, in which weights that were untied are counted once."""
    whole, tensors = cost(calibration.structure, calibration.model), named_tensors(calibration.model)
    shared = sum(tensors[name].numel() for name in calibration.traced.standalone.given.untied)
    return dataclasses.replace(whole, parameters=whole.parameters - shared)


def _constant(calibration: Calibration, keep: Tensor) -> dict[str, ConstantChannels]:
    constants = constant_channels(calibration)
    found = {}
    for group in calibration.structure.prunable:
        if count := constants.found(group):
            gone = int((constants.mask & ~keep)[group.channels].sum())
            found[group.name] = ConstantChannels(count, gone, constants.samples[group.name])
    return found


def _dependent(calibration: Calibration, rankings: Mapping[str, Ranking], keep: Tensor) -> dict[str, DependentChannels]:
    constants, found = constant_channels(calibration), {}
    for group in calibration.structure.prunable:
        ranking = rankings.get(group.name)
        if ranking is not None and ranking.most is not None:
            last = ranking.order[ranking.most :].cpu() + group.start
            others = last[~constants.mask[last]]
            if len(others):
                found[group.name] = DependentChannels(len(others), int((~keep[others]).sum()))
    return found


def score_of(
    smaller: nn.Module, allocation: Allocation, recovered: Recovered, acceptance: Acceptance | None
) -> Score | None:
    """What was measured of both models: on the way to a tolerance, or now."""
    if acceptance is None:
        return None
    search = allocation.search
    if search is not None and recovered is search.recovered:
        verdict = Verdict(acceptance.base - search.drop, search.drop, search.bound, search.top5)
    else:
        verdict = judged(acceptance, smaller)
    tolerance, trials = (None, ()) if search is None else (search.tolerance, search.trials)
    return Score(
        *(acceptance.base, verdict.score, tolerance, trials, acceptance.what, verdict.bound),
        top5_before=acceptance.top5,
        top5_after=verdict.top5,
    )


def described(method: Method) -> dict[str, Any]:
    """The method's name and fields as plain data."""
    names: list[str] = [field.name for field in dataclasses.fields(method)] if dataclasses.is_dataclass(method) else []
    return {"name": type(method).__name__, **{name: _plain(getattr(method, name)) for name in names}}


def _plain(value: Any) -> Any:
    return getattr(value, "__name__", type(value).__name__) if callable(value) else value
