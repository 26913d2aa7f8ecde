"""What a report says: costs before and after, every group's width, how well layers recovered, what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from recoup.allocation.goal import Trial
from recoup.allocation.latency import Latency
from recoup.channels.cost import Cost
from recoup.channels.structure import Group, Structure
from recoup.inputs.resources import PeakMemory
from recoup.plan import Recovery
from recoup.report.formatting import duration
from recoup.statistics.calibrate import ENOUGH_SAMPLES
from recoup.surgery.comparison import Proof
from recoup.tracing.class_support import BREAKS
from recoup.training.record import Epoch


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: its width before and after, how many channels are locked and why, who makes and who reads it."""

    name: str
    before: int
    after: int
    locked: int
    reasons: tuple[str, ...]
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConstantChannels:
    """Channels of one group that were constant on the calibration images: how many `found`, how many of them `gone`.

    `samples` that differ and count vouch for it, `ENOUGH_SAMPLES` or fewer.
    """

    found: int
    gone: int
    samples: int

    def __str__(self) -> str:
        return f"{self.found} constant, {self.gone} of them gone"


@dataclass(frozen=True, slots=True)
class DependentChannels:
    """Channels of one group that are exact combinations of others: how many `found`, how many of them `gone`.

    They are looked for where there is no ridge, with which alone they could be fitted on.
    """

    found: int
    gone: int


@dataclass(frozen=True, slots=True)
class Score:
    """Points of the original and of the smaller model, the tolerance asked for (None: a budget), and every trial.

    `what` the points are of: "accuracy", "agreement" with the original, or the caller's own "score". `bound` is the
    most that may be lost on unseen images, with the method's confidence. `top5` counts a label among the five largest
    outputs; None without labels, or with ten classes or fewer.
    """

    before: float
    after: float
    tolerance: float | None
    trials: tuple[Trial, ...]
    what: str = "score"
    bound: float | None = None
    top5_before: float | None = None
    top5_after: float | None = None

    @property
    def drop(self) -> float:
        """Points lost."""
        return self.before - self.after


@dataclass(frozen=True, slots=True)
class Report:
    """The whole story of one pruning; `form` says why the result is a standalone graph, None if it is not.

    `method` has the method's name and fields. `held_out` is the output error on held-out images of each recovery that
    was tried; the least was kept. `latency` is there for a budget of time. `constant` names the groups with channels
    that were constant on the calibration images, `dependent` those with exact combinations of others. `finetuned` has
    the epochs of training that came after; all other figures are of the network before it. `memory` is the peak on a
    GPU. `notes` say what was done beside pruning.
    """

    network: str
    before: Cost
    after: Cost
    groups: tuple[GroupRow, ...]
    recovery: Mapping[str, Recovery]
    proof: Proof
    samples: int
    score: Score | None
    seconds: Mapping[str, float]
    method: Mapping[str, Any]
    form: str | None = None
    held_out: Mapping[str, float] = field(default_factory=dict)
    latency: Latency | None = None
    constant: Mapping[str, ConstantChannels] = field(default_factory=dict)
    dependent: Mapping[str, DependentChannels] = field(default_factory=dict)
    finetuned: tuple[Epoch, ...] = ()
    memory: PeakMemory | None = None
    notes: tuple[str, ...] = ()

    @property
    def macs_removed(self) -> float:
        """Share of the multiply-accumulates that is gone."""
        return 1 - self.after.macs / self.before.macs

    @property
    def flops_removed(self) -> float:
        """Share of the FLOPs that is gone, as the paper counts them."""
        return 1 - self.after.flops / self.before.flops

    @property
    def parameters_removed(self) -> float:
        """Share of the parameters that is gone."""
        return 1 - self.after.parameters / self.before.parameters

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before trusting the figures."""
        return (*self._idleness(), *self._excess(), *self._slowness(), *self._doubts(), *self._constancy())

    @property
    def held_by_class(self) -> str | None:
        """Which groups stay whole because the model's own class cannot hold them at another size."""
        held = [group.name for group in self.groups if any(reason.startswith(BREAKS) for reason in group.reasons)]
        if not held or self.form is not None:
            return None
        names = ", ".join(held[:5]) + (f" and {len(held) - 5} more" if len(held) > 5 else "")
        return (
            f"whole, as the model's own class cannot hold them at another size: {names}; keep_class=False cuts them "
            "too, in a standalone graph"
        )

    def _idleness(self) -> tuple[str, ...]:
        tolerance = None if self.score is None else self.score.tolerance
        if tolerance is None or any(group.after < group.before for group in self.groups):
            return ()
        return (
            f"nothing was pruned: every candidate lost more than the tolerance of {tolerance:g} points, or might have. "
            "Ask for more, give more calibration or validation images, or ask for a budget.",
        )

    def _excess(self) -> tuple[str, ...]:
        score = self.score
        if score is None or score.tolerance is None or score.bound is None or score.bound < score.tolerance:
            return ()
        return (
            f"{score.drop:.2f} points are lost on the images looked at and up to {score.bound:.2f} may be on others, "
            f"more than the tolerance of {score.tolerance:g}: the widths given by hand lose that much by themselves. "
            "Widen them, or ask for more.",
        )

    def _slowness(self) -> tuple[str, ...]:
        if self.latency is None or self.latency.is_met:
            return ()
        return (
            f"the smaller network takes {self.latency.share:.1%} of the time of the original, more than the "
            f"{self.latency.asked:.1%} asked for: it is the fastest of those that were tried. Ask for a smaller share, "
            "time larger batches, or see that nothing else runs on the device.",
        )

    def _doubts(self) -> tuple[str, ...]:
        poor = {name: recovery for name, recovery in self.recovery.items() if recovery.is_underdetermined}
        if not poor:
            return ()
        name, worst = max(poor.items(), key=lambda item: item[1].inputs - item[1].rows)
        return (
            f"{len(poor)} of {len(self.recovery)} refitted layers saw fewer samples than they have inputs ({name}: "
            f"{worst.rows} for {worst.inputs}, where positions that do not count are left out), so they fit the "
            "calibration images better than new ones. Calibrate on more images.",
        )

    def _constancy(self) -> tuple[str, ...]:
        """What constant channels may hide: told where few samples vouch for them, or where they are most of a group."""
        before = {group.name: group.before for group in self.groups}
        gone = {name: group for name, group in self.constant.items() if group.gone}
        much = [name for name, group in gone.items() if 2 * group.found > before[name]]
        few = [name for name, group in gone.items() if group.gone > group.found * group.samples // ENOUGH_SAMPLES]
        if not much and not few:
            return ()
        named = "; ".join(f"{name}: {gone[name].gone} of {before[name]}" for name in dict.fromkeys((*much, *few)))
        least = min(gone[name].samples for name in (*much, *few))
        seen = f"; only {least} different ones were seen that count" if few else ""
        return (
            f"channels are gone that were constant on the calibration images{seen} ({named}). What they do on other "
            "images is not known. See that calibration images are as varied as those to come"
            f"{f', and at least {ENOUGH_SAMPLES} of them' if few else ''}.",
        )

    @property
    def constancy(self) -> str | None:
        """How many channels were constant and how many of them are gone, in a line; None if there are none."""
        if not self.constant:
            return None
        found, gone = (sum(getattr(group, what) for group in self.constant.values()) for what in ("found", "gone"))
        named = "; ".join(f"{name}: {group}" for name, group in self.constant.items())
        return f"{found} channels were constant on the calibration images, {gone} of them are gone ({named})"

    @property
    def dependence(self) -> str | None:
        """How many channels were exact combinations of others, in a line; None if there are none."""
        if not self.dependent:
            return None
        found, gone = (sum(getattr(group, what) for group in self.dependent.values()) for what in ("found", "gone"))
        named = "; ".join(f"{name}: {group.found}" for name, group in self.dependent.items())
        return f"{found} channels were exact combinations of others, {gone} of them are gone ({named})"

    @property
    def retraining(self) -> str | None:
        """How long it was fine-tuned and what became of the loss, in a line; None if it was not."""
        if not self.finetuned:
            return None
        first, last = self.finetuned[0], self.finetuned[-1]
        points = "" if last.accuracy is None else f", accuracy {last.accuracy:.2f} at the end"
        return f"fine-tuned for {len(self.finetuned)} epochs: loss {first.loss:.4f} -> {last.loss:.4f}{points}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        data: dict[str, Any] = dataclasses.asdict(self)
        data["before"], data["after"] = self.before.to_json(), self.after.to_json()
        data["macs_removed"], data["parameters_removed"] = self.macs_removed, self.parameters_removed
        data["flops_removed"] = self.flops_removed
        data["warnings"] = list(self.warnings)
        if self.score is not None:
            data["score"]["drop"] = self.score.drop
        if self.latency is not None:
            data["latency"]["share"] = self.latency.share
        return data

    def __str__(self) -> str:
        lines = [
            f"{self.network}: MACs {self.before.macs:,} -> {self.after.macs:,} (-{self.macs_removed:.1%}), "
            f"FLOPs {self.before.flops:,} -> {self.after.flops:,} (-{self.flops_removed:.1%}), "
            f"parameters {self.before.parameters:,} -> {self.after.parameters:,} (-{self.parameters_removed:.1%})"
        ]
        if self.latency is not None:
            before, after = duration(self.latency.before), duration(self.latency.after)
            lines.append(f"time of a batch {before} -> {after} ({self.latency.share:.1%} of it)")
        if self.score is not None:
            change = f"{self.score.before:.2f} -> {self.score.after:.2f} ({-self.score.drop:+.2f} points)"
            lines.append(f"{self.score.what} {change}")
            if self.score.top5_before is not None and self.score.top5_after is not None:
                lines.append(f"top-5 accuracy {self.score.top5_before:.2f} -> {self.score.top5_after:.2f}")
        if self.held_out:
            errors = ", ".join(f"{name} {error:.4f}" for name, error in self.held_out.items())
            lines.append(f"output error on held-out images: {errors}")
        lines += [
            told for told in (self.constancy, self.dependence, self.retraining, self.held_by_class) if told is not None
        ]
        if self.memory is not None:
            lines.append(f"peak GPU memory: {self.memory}")
        if self.form is not None:
            lines.append(f"the result is a standalone graph: {self.form}")
        lines += self.notes
        lines.append(f"proof: smaller = masked original to {self.proof.difference:.1e}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def group_rows(structure: Structure, keep: Tensor | None = None) -> tuple[GroupRow, ...]:
    """A row for every group at the widths of `keep`."""
    mask = structure.keep_all() if keep is None else keep
    return tuple(_row(group, int(mask[group.channels].sum())) for group in structure.groups)


def _row(group: Group, after: int) -> GroupRow:
    locked = int(group.locked.sum())
    return GroupRow(group.name, group.width, after, locked, group.reasons, group.producers, group.consumers)
