"""A magnitude cut and its proof: trace, rank by the norm of filters, take half of the MACs, verify. No data."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

import recoup
from benchmarks.zoo.counting import SAMPLES, Observed, observe
from benchmarks.zoo.reach import Span, locks_of, span_of
from benchmarks.zoo.rows import CutRow, brief
from benchmarks.zoo.seconds import timed
from benchmarks.zoo.spec import Spec
from recoup.algebra.selection import Ranking
from recoup.allocation.widths import Widths
from recoup.channels.cost import cost
from recoup.channels.structure import Group, Structure
from recoup.inputs.batches import inputs_of
from recoup.tracing.trace import Traced, plain_cut

BISECTIONS = 12  # one channel in 4096


def examine(spec: Spec) -> CutRow:
    """What Recoup makes of a network, without any data."""
    seconds: dict[str, float] = {}
    with timed(seconds, "total"):
        row = _examine(spec, seconds)
    return replace(row, seconds=seconds)


def _examine(spec: Spec, seconds: dict[str, float]) -> CutRow:
    model, example = spec.build(), spec.example(1)
    before = observe(model, spec.example(SAMPLES), SAMPLES)
    start = CutRow("untouched", macs=before.macs)
    with timed(seconds, "export"), suppress(Exception):  # the same failure is reported by `trace`
        sample = inputs_of(example, model)
        torch.export.export(copy.deepcopy(model), sample.args, dict(sample.kwargs), strict=False)
    try:
        with timed(seconds, "trace"):
            traced = recoup.trace(model, example)
    except recoup.RecoupError as error:
        return replace(start, result="refused", why=brief(error))
    structure = traced.structure
    locks, said = locks_of(structure), cost(structure, traced.host).macs
    start = replace(start, said=said, locked=locks.share, reasons=locks.reasons)
    if not structure.prunable:
        return start
    span = span_of(traced)
    row = replace(start, least=span.least / max(1, span.most), goal=span.named)
    widths = _widths(traced.host, structure)
    with timed(seconds, "choose"):
        keep = _choose(traced.host, widths, span)
    with timed(seconds, "verify"):
        smaller, row = _prune(model, traced, keep, row)
    return row if smaller is None else _judge(smaller, spec, before, row)


def _choose(model: nn.Module, widths: Widths, span: Span) -> Tensor:
    """The mask of the largest common share of every group that meets the goal."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        fits = cost(widths.structure, model, _keep(widths, middle)).macs <= span.goal
        low, high = (middle, high) if fits else (low, middle)
    return _keep(widths, low)


def _keep(widths: Widths, share: float) -> Tensor:
    return widths.keep(widths.structure.prunable, share, widths.structure.keep_all())


def _widths(model: nn.Module, structure: Structure) -> Widths:
    """Every group ranked by the norm of its filters."""
    norms = _filter_norms(model, structure)
    rankings = {group.name: _ranking(norms, group) for group in structure.prunable}
    return Widths(structure, rankings)


def _prune(model: nn.Module, traced: Traced, keep: Tensor, row: CutRow) -> tuple[nn.Module | None, CutRow]:
    """The smaller model, unless it was refused, and the row with the proof."""
    try:
        plan = plain_cut(traced, keep)
        smaller = recoup.apply(model, plan)
        proof = recoup.verify(model, plan, smaller, traced.inputs)
    except recoup.RecoupError as error:
        return None, replace(row, result="refused", why=brief(error))
    form = "class" if type(smaller) is type(model) else "graph"
    return smaller, replace(row, result="pruned", form=form, difference=proof.difference)


def _judge(smaller: nn.Module, spec: Spec, before: Observed, row: CutRow) -> CutRow:
    """`row` with what the smaller model costs and returns for another number of samples."""
    try:
        after = observe(smaller, spec.example(SAMPLES), SAMPLES)
    except Exception as error:  # a size of the traced batch that stayed in it
        return replace(row, result="forward crashes", why=brief(error))
    return replace(row, kept=after.macs / max(1, before.macs), same_shapes=after.shapes == before.shapes)


def _filter_norms(model: nn.Module, structure: Structure) -> Tensor:
    """For every channel, the sum of squares of the filters that make it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    squares = torch.zeros(structure.width, dtype=torch.float64)
    for site in structure.sites:
        weight = parameters.get(site.tensor)
        if weight is not None and site.dim == 0 and weight.dim() > 1:
            known = site.channel_of >= 0
            rows = weight.detach().double().flatten(1).square().sum(1)
            squares.index_add_(0, site.channel_of[known], rows[known])
    return squares


def _ranking(norms: Tensor, group: Group) -> Ranking:
    """The group's channels by norm, locked ones first."""
    mine = norms[group.channels].masked_fill(group.locked, torch.inf)
    return Ranking(mine.argsort(descending=True, stable=True))
