"""The stages of `recoup.prune` for a share of the MACs, one by one, so that shares and methods can have some in common.

With the settings of a preset they make what `recoup.prune(..., budget=Budget(macs=1 - share))` makes; a test checks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

import recoup
from benchmarks.networks import Bench
from benchmarks.paper import timed
from benchmarks.rows import Outcome
from recoup.algebra.selection import Ranking
from recoup.calibrate import Calibration, calibrate
from recoup.judging.harm import Reference
from recoup.judging.sample import Sample, sample_of
from recoup.search import Allocator, allocator, keep_in_rounds, keep_within
from recoup.settings import Budget, Settings
from recoup.structure.cost import cost
from recoup.structure.trace import Traced
from recoup.structure.verify import prove
from recoup.variants import Chosen, Recoverer


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """All that comes before widths are decided, and the seconds of every stage."""

    model: nn.Module
    traced: Traced
    sample: Sample
    reference: Reference
    seen: Calibration
    rankings: Mapping[str, Ranking]
    allocation: Allocator
    seconds: Mapping[str, float]

    def with_settings(self, **changes: Any) -> Prepared:
        """The same with other settings, which only recovery may notice."""
        return replace(self, seen=replace(self.seen, settings=replace(self.seen.settings, **changes)))

    def keep(self, share: float) -> Tensor:
        """The mask that removes `share` of the MACs."""
        budget, recoverer = Budget(macs=1 - share), self.recoverer()
        return keep_in_rounds(
            self.allocation,
            lambda allocation: keep_within(allocation, budget),
            lambda keep: recoverer.plan(keep, quick=True).harms,
            self.seen.settings.rounds,
        )

    def recoverer(self) -> Recoverer:
        """A new one, which remembers nothing: its time is all its own."""
        return Recoverer(self.seen, self.sample, self.reference)

    def removed(self, keep: Tensor) -> float:
        """The share of the MACs that a mask removes."""
        whole, left = (cost(self.seen.structure, self.model, mask).macs for mask in (None, keep))
        return 1 - left / whole

    def outcome(self, bench: Bench, keep: Tensor, chosen: Chosen, stages: Mapping[str, float]) -> Outcome:
        """The smaller network of a plan, measured; `stages` are the seconds that came on top of the shared ones."""
        seconds = {**self.seconds, **stages}
        smaller, _ = timed(seconds, "prove", lambda: prove(self.model, chosen.plan, self.traced.inputs))
        made = bench.outcome(smaller, self.removed(keep), seconds)
        return replace(made, harm=min(chosen.harms.values()))


def prepare(model: nn.Module, batches: Sequence[Any], settings: Settings) -> Prepared:
    """Trace, calibrate, rank the channels and measure the groups, on one calibration sample."""
    seconds: dict[str, float] = {}
    traced = timed(seconds, "trace", lambda: recoup.trace(model, batches[0]))
    sample = timed(seconds, "sample", lambda: sample_of(model, batches))
    host = traced.standalone.host
    reference = timed(seconds, "reference", lambda: Reference(host, sample.judging(), settings.outputs))
    seen = timed(seconds, "calibrate", lambda: calibrate(model, traced, fitting(sample), settings))
    rankings = timed(seconds, "select", lambda: recoup.select(seen))
    allocation = timed(seconds, "allocate", lambda: allocator(model, seen, rankings, reference))
    return Prepared(model, traced, sample, reference, seen, rankings, allocation, seconds)


def fitting(sample: Sample) -> list[Any]:
    """The batches that are not held out."""
    return [sample.batches[place] for place in sample.seen]
