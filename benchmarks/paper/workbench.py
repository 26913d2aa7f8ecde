"""A network with its images, and the stages that many cases share: traced once, calibrated once, ranked once.

Statistics do not depend on tolerance, order, constraint or selector. A calibration is made once for every way to weigh
and to hold out, and given the method of the case at hand; rankings are made once per selector.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import recoup
from benchmarks.machine import timed
from benchmarks.networks import Batches, verified
from benchmarks.paper.cases import BEST, PAPER, RELEASED, Case, Outcome
from recoup.algebra.selection import looks_at_images
from recoup.channels.cost import cost
from recoup.graph.modes import evaluating
from recoup.judge.acceptance import Acceptance, ImageAcceptance, ScoreAcceptance
from recoup.methods.registry import EVEN_ODDS

Method = recoup.Paper | recoup.Released | recoup.Best
Made = TypeVar("Made")
# Images per batch of the fast measure: enough to fill a large GPU with small images.
FAST_BATCH = 5000
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network, its calibration images by "source:count" and seed, and the images it is measured on.

    `usual` is the source and count where a case names none. `training` are labelled images to retrain with.
    """

    network: str
    model: nn.Module
    images: Callable[[str, int], Batches]
    usual: str
    splits: Mapping[str, Batches]
    training: Callable[[], Batches]
    machine: str
    keep_class: bool = False
    _acceptances: dict[Hashable, Acceptance] = field(default_factory=dict)

    @property
    def traced(self) -> recoup.Traced:
        """The structure; the same for all images."""
        return self._traced_in[0]

    @property
    def trace_seconds(self) -> float:
        """What tracing took, the start of torch.export in this process included."""
        return self._traced_in[1]

    @cached_property
    def _traced_in(self) -> tuple[recoup.Traced, float]:
        images, _ = self.splits["validation"][0]
        seconds: dict[str, float] = {}
        made = timed(seconds, "trace", lambda: recoup.trace(self.model, images[:2], keep_class=self.keep_class))
        return made, seconds["trace"]

    @cached_property
    def base(self) -> dict[str, float]:
        """Accuracy of the network as it is, by split."""
        return {name: recoup.accuracy(self.model, batches) for name, batches in self.splits.items()}

    def acceptance(self, method: Method, fast: str | None) -> Acceptance:
        """What measures candidates on the validation images; `fast` names a lower precision to do so in."""
        key = method.confidence, fast
        if key not in self._acceptances:
            self._acceptances[key] = self._acceptance(method, fast)
        return self._acceptances[key]

    def _acceptance(self, method: Method, fast: str | None) -> Acceptance:
        validation = self.splits["validation"]
        if fast is not None:
            return ScoreAcceptance(self.model, FastAccuracy(validation, fast))
        return ImageAcceptance(self.model, validation, method.confidence or EVEN_ODDS)

    def outcome(self, smaller: nn.Module, stages: Mapping[str, float], memory: Mapping[str, int]) -> Outcome:
        """What a smaller network loses, in float32."""
        top1 = {name: recoup.accuracy(smaller, batches) for name, batches in self.splits.items()}
        return Outcome(
            top1=top1["test"],
            base=self.base["test"],
            validation_drop=self.base["validation"] - top1["validation"],
            test_drop=self.base["test"] - top1["test"],
            kl=recoup.divergence(smaller, self.model, self.splits["test"]),
            stages=dict(stages),
            memory=dict(memory),
        )


class FastAccuracy:
    """Top-1 accuracy in points: large batches that stay on the device, channels last, products in low precision."""

    def __init__(self, batches: Batches, precision: str) -> None:
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self._precision = PRECISIONS[precision]
        self._images = images.to(memory_format=torch.channels_last).split(FAST_BATCH)
        self._labels = labels

    def __call__(self, model: nn.Module) -> float:
        kind = self._labels.device.type
        with evaluating(model), torch.autocast(kind, self._precision):
            answers = torch.cat([model(images).argmax(dim=1) for images in self._images])
        return 100.0 * float((answers == self._labels).double().mean())


@dataclass(slots=True)
class Clock:
    """Seconds, and the peak of the GPU's memory, by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def __call__(self, stage: str, work: Callable[[], Made]) -> Made:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        made = timed(self.seconds, stage, work)
        if on_gpu:
            self.memory[stage] = torch.cuda.max_memory_allocated()
        return made

    def forget(self, stage: str) -> None:
        """Leave out a stage that this case would not have needed."""
        self.seconds.pop(stage, None)
        self.memory.pop(stage, None)

    def copy(self) -> Clock:
        """A clock that goes on from here on its own."""
        return Clock(dict(self.seconds), dict(self.memory))


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """A calibration with the method of a case, its rankings, and the clock of both."""

    seen: recoup.Calibration
    rankings: Mapping[str, recoup.Ranking]
    clock: Clock


@dataclass(frozen=True, eq=False)
class Sample:
    """One calibration sample of a network."""

    subject: Subject
    data: str
    seed: int
    _calibrated: dict[Hashable, tuple[recoup.Calibration, Clock]] = field(default_factory=dict)
    _ranked: dict[Hashable, Ranked] = field(default_factory=dict)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returned when it was first asked for under this key."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    @cached_property
    def batches(self) -> Batches:
        """The images."""
        return self.subject.images(self.data or self.subject.usual, self.seed)

    def calibrated(self, method: Method) -> tuple[recoup.Calibration, Clock]:
        """The statistics that serve a method, made at the first call."""
        key = statistics_key(method)
        if key not in self._calibrated:
            clock, _ = Clock({"trace": self.subject.trace_seconds}), self.batches  # reading images is not counted
            seen = clock("statistics", lambda: self._calibrate(method))
            self._calibrated[key] = seen, clock
        seen, clock = self._calibrated[key]
        return replace(seen, method=method), clock.copy()

    def ranked(self, method: Method) -> Ranked:
        """The same with the rankings of the method's selector."""
        key = statistics_key(method), method.selector
        if key not in self._ranked:
            seen, clock = self.calibrated(method)
            self._ranked[key] = Ranked(seen, clock("selection", lambda: recoup.rank(seen)), clock)
        known = self._ranked[key]
        return Ranked(replace(known.seen, method=method), known.rankings, known.clock.copy())

    def _calibrate(self, method: Method) -> recoup.Calibration:
        data = recoup.split(self.subject.model, self.batches, held_out=method.holds_out)
        return recoup.calibrate(self.subject.traced, data, method)


def statistics_key(method: Method) -> Hashable:
    """What the statistics depend on; the selector only where it asks for more than covariances and filters."""
    shared = method.holds_out, method.weighting, method.positions, method.ridge, method.seed
    return *shared, asked_by(method.selector)


def asked_by(selector: Any) -> Hashable:
    """Whether a selector looks at images, of which the calibration then keeps some."""
    return looks_at_images(selector)


def search(sample: Sample, case: Case, options: argparse.Namespace) -> Outcome:
    """What the case's method removes within its tolerance, and what that loses."""
    assert case.tolerance is not None
    method = method_of(case, options)
    ranked = sample.ranked(method)
    fast = options.fast_evaluate if case.method != BEST else None
    acceptance = sample.subject.acceptance(method, fast)
    acceptance.require_enough(case.tolerance)
    goal = recoup.Goal(tolerance=case.tolerance, validation=sample.subject.splits["validation"])
    clock = ranked.clock
    allocation = clock("search", lambda: recoup.allocate(ranked.seen, ranked.rankings, goal, acceptance))
    smaller = clock("finish", lambda: finished(ranked.seen, allocation))
    trials = allocation.search.trials if allocation.search is not None else ()
    made = sample.subject.outcome(smaller, clock.seconds, clock.memory)
    return replace(with_sizes(made, ranked.seen, allocation.keep), evaluations=len(trials))


def finished(seen: recoup.Calibration, allocation: recoup.Allocation | Tensor) -> nn.Module:
    """The smaller network, proven to be right."""
    return verified(seen, recoup.recover(seen, allocation).plan)


def with_sizes(outcome: Outcome, seen: recoup.Calibration, keep: Tensor) -> Outcome:
    """The outcome with what the mask removes: of the cost, and of every group that can be pruned."""
    whole, left = (cost(seen.structure, seen.model, mask) for mask in (None, keep))
    sparsity = {g.name: 1 - float(keep[g.channels].double().mean()) for g in seen.structure.prunable}
    removed = {name: removed_share(whole, left, name) for name in ("macs", "flops")}
    return replace(outcome, removed=removed["macs"], flops_removed=removed["flops"], sparsity=sparsity)


def removed_share(whole: object, left: object, of: str) -> float | None:
    """Percent removed of one kind of cost; None where costs do not tell it."""
    before, after = (getattr(each, of, None) for each in (whole, left))
    return None if before is None or after is None else 100 * (1 - after / before)


def precision_of(case: Case, options: argparse.Namespace) -> str:
    """In which precision the case's search measures its candidates."""
    is_fast = options.fast_evaluate and case.tolerance is not None and case.method != BEST
    return str(options.fast_evaluate) if is_fast else "float32"


def method_of(case: Case, options: argparse.Namespace) -> Method:
    """The method of a case, with the fields that the case or the command line names."""
    kind: dict[str, type[Method]] = {PAPER: recoup.Paper, RELEASED: recoup.Released, BEST: recoup.Best}
    named: dict[str, Any] = {"selector": case.selector, "order": case.order, "constraint": case.constraint}
    named |= {
        "unit": case.unit or options.unit,
        "ridge": options.ridge,
        "weighting": case.weighting or options.weighting,
        "positions": options.positions,
    }
    said = {name: value for name, value in named.items() if value is not None and value != ""}
    if said.get("positions") == 0:
        said["positions"] = None  # all of them
    made_of = kind[case.method]
    has = {part.name for part in fields(made_of)}
    return made_of(seed=case.seed, **{name: value for name, value in said.items() if name in has})
