"""Recoup's side: trace, rank by magnitude, take half of the MACs, verify. All use of Recoup is in this file."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import recoup
from benchmarks.zoo.counting import SAMPLES, Observed, observe
from benchmarks.zoo.rows import OurRow, Reason, brief
from benchmarks.zoo.suites import Spec
from recoup.algebra.selection import Ranking
from recoup.allocation.widths import Widths
from recoup.channels.cost import cost, macs_by_call
from recoup.channels.groups import Group, Structure
from recoup.tracing.trace import Traced, plain_cut

BISECTIONS = 12  # one channel in 4096
REASONS_SHOWN = 3
NUMBER = re.compile(r"(?<![A-Za-z])\d+(\.\d+)?(e[-+]\d+)?")
LINE = re.compile(r" \([^()]+:\d+\)")


@dataclass(frozen=True, slots=True)
class Span:
    """MACs of the whole model and of the least possible, as Recoup counts them."""

    most: int
    least: int

    @property
    def has_half(self) -> bool:
        """Whether half of all MACs is within reach."""
        return 2 * self.least <= self.most

    @property
    def goal(self) -> float:
        """Half of all, or where that is out of reach half way to the least."""
        return self.most / 2 if self.has_half else (self.most + self.least) / 2


def examine(spec: Spec) -> OurRow:
    """What Recoup makes of a network, without any data."""
    seconds: dict[str, float] = {}
    with _timed(seconds, "total"):
        row = _examine(spec, seconds)
    return replace(row, seconds=seconds)


def _examine(spec: Spec, seconds: dict[str, float]) -> OurRow:
    model, example = spec.build(), spec.example(1)
    before = observe(model, spec.example(SAMPLES))
    start = OurRow("untouched", macs=before.macs)
    with _timed(seconds, "export"), suppress(Exception):  # the same failure is reported by `trace`
        torch.export.export(copy.deepcopy(model), example, strict=False)
    try:
        with _timed(seconds, "trace"):
            traced = recoup.trace(model, example)
    except recoup.RecoupError as error:
        return replace(start, result="refused", why=brief(error))
    structure = traced.structure
    start = replace(start, said=cost(structure, traced.host).macs)
    if not structure.prunable:
        return _with_locks(start, structure)
    widths = _widths(traced.host, structure)
    span = _span(traced, widths)
    row = replace(start, least=span.least / max(1, span.most), goal="half" if span.has_half else "half way")
    row = _with_locks(row, structure)
    with _timed(seconds, "choose"):
        keep = _choose(traced.host, widths, span)
    with _timed(seconds, "verify"):
        smaller, row = _prune(model, traced, keep, row)
    return row if smaller is None else _judge(smaller, spec, before, row)


def _span(traced: Traced, widths: Widths) -> Span:
    """How far the MACs can go down."""
    return Span(*(cost(traced.structure, traced.host, keep).macs for keep in (None, _keep(widths, 0.0))))


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


def _prune(model: nn.Module, traced: Traced, keep: Tensor, row: OurRow) -> tuple[nn.Module | None, OurRow]:
    """The smaller model, unless it was refused, and the row with the proof."""
    try:
        plan = plain_cut(traced, keep)
        smaller = recoup.apply(model, plan)
        proof = recoup.verify(model, plan, smaller, traced.inputs)
    except recoup.RecoupError as error:
        return None, replace(row, result="refused", why=brief(error))
    form = "class" if type(smaller) is type(model) else "graph"
    return smaller, replace(row, result="pruned", form=form, difference=proof.difference)


def _judge(smaller: nn.Module, spec: Spec, before: Observed, row: OurRow) -> OurRow:
    """`row` with what the smaller model costs and returns for another number of samples."""
    try:
        after = observe(smaller, spec.example(SAMPLES))
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


def _with_locks(row: OurRow, structure: Structure) -> OurRow:
    """`row` with the share of MACs that is locked, and what locks most of it."""
    macs = macs_by_call(structure, structure.keep_all())
    fixed = [other for other in structure.others if not other.sides]
    total = max(1, sum(other.macs for other in structure.others) + sum(macs.values()))
    groups = _group_of_channel(structure)
    by_reason: dict[str, float] = {}
    for other in fixed:
        text = f"{_general(other.site)} is no layer, and nothing that it reads is cut"
        by_reason[text] = by_reason.get(text, 0) + other.macs / total
    locked = sum(other.macs for other in fixed)
    for product in structure.products:
        touched = _touched(structure, product.weight, groups)
        if any(group.free and group.width > 1 for group in touched):
            continue
        locked += macs[product.node]
        for text in {_general(group.reasons[0]) for group in touched if group.reasons}:
            by_reason[text] = by_reason.get(text, 0) + macs[product.node] / total
    worst = sorted(by_reason.items(), key=lambda item: -item[1])[:REASONS_SHOWN]
    return replace(row, locked=locked / total, reasons=tuple(Reason(share, text) for text, share in worst))


def _group_of_channel(structure: Structure) -> Tensor:
    widths = torch.tensor([group.width for group in structure.groups], dtype=torch.long)
    return torch.arange(len(widths)).repeat_interleave(widths)


def _touched(structure: Structure, weight: str, groups: Tensor) -> list[Group]:
    """The groups that a layer reads or makes."""
    sides = [site.channel_of for site in structure.sites if site.tensor == weight]
    numbers = {int(number) for side in sides for number in groups[side[side >= 0]].unique()}
    return [structure.groups[number] for number in sorted(numbers)]


def _general(reason: str) -> str:
    """The reason without lines and numbers, those in the names of modules too: one for all blocks of a kind."""
    return NUMBER.sub("*", LINE.sub("", reason))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = round(time.perf_counter() - start, 2)
