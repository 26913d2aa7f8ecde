"""The paper's binary structural search with step constraint.

Visit i = 1..L units (layers, or residual blocks) in order. Unit i may bring the accuracy drop to τ_i = τ · i / L (step
constraint) or τ (global). Bisect its sparsity in [0, 1) for k steps: prune and compensate at the midpoint, measure;
a drop of τ_i or more lowers the upper end, less raises the lower end, whose channels are kept in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recoup.algebra.selection import Ranking
from recoup.calibrate import Calibration
from recoup.errors import LockedError, UsageError, VerificationError
from recoup.evaluate import Evaluate, checked
from recoup.progress import Progress, silent
from recoup.recover import Compensator
from recoup.search.budget import widths_for
from recoup.settings import Settings
from recoup.structure.groups import Structure
from recoup.structure.surgery import apply


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement: these groups at this share kept, the drop it gave and the drop allowed."""

    groups: tuple[str, ...]
    share: float
    drop: float
    allowed: float

    @property
    def accepted(self) -> bool:
        """Whether the drop stayed below what was allowed."""
        return self.drop < self.allowed


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """The mask found, the original's score, the drop at the mask, and every measurement on the way."""

    keep: Tensor
    base: float
    drop: float
    trials: tuple[Trial, ...]


def search(
    model: nn.Module,
    calibration: Calibration,
    rankings: Mapping[str, Ranking],
    evaluate: Evaluate,
    tolerance: float,
    progress: Progress = silent,
) -> Search:
    """The channels that can go while the score of `evaluate` drops by less than `tolerance` points."""
    if not tolerance > 0:
        raise UsageError(f"tolerance must be above 0 points, got {tolerance}. For a fixed size ask for a budget.")
    walk = _Walk(model, calibration, rankings, checked(evaluate))
    units = visiting_order(calibration)
    if not units:
        raise LockedError(
            "the search has nothing to visit: all that can be pruned is read by the last layer, which the paper "
            "spares. Use Settings(classifier=True), or ask for a budget."
        )
    steps = calibration.settings.steps
    keep, drop = walk.start(tolerance / max(1, len(units)))
    for i, unit in enumerate(units, start=1):
        allowed = tolerance * (i / len(units) if calibration.settings.constraint == "step" else 1.0)
        keep, drop = walk.bisect(unit, keep, drop, allowed)
        progress("search", i * steps, len(units) * steps)
    return Search(keep, walk.base, drop, tuple(walk.trials))


def visiting_order(calibration: Calibration) -> list[tuple[str, ...]]:
    """The units to visit, as names of groups."""
    settings, structure = calibration.settings, calibration.structure
    spared = set() if settings.classifier else _read_by_last_layer(structure)
    prunable = [group.name for group in structure.prunable if group.name not in spared]
    blocks = calibration.traced.blocks if settings.unit == "block" else tuple((name,) for name in prunable)
    units = [tuple(name for name in block if name in prunable) for block in blocks]
    return _ordered([unit for unit in units if unit], settings)


class _Walk:
    """Measures candidates and writes down every trial."""

    def __init__(
        self, model: nn.Module, calibration: Calibration, rankings: Mapping[str, Ranking], evaluate: Evaluate
    ) -> None:
        self._model, self._calibration, self._evaluate = model, calibration, evaluate
        self._compensator = Compensator(calibration)
        self._widths = widths_for(calibration, rankings)
        self.base = evaluate(model)
        self.trials: list[Trial] = []

    def start(self, allowed: float) -> tuple[Tensor, float]:
        """Without the dead channels if that costs nothing to speak of, otherwise with everything."""
        whole = self._calibration.structure.keep_all()
        live = ~self._widths.dead
        if bool(live.all()):
            return whole, 0.0
        drop = self._drop(live)
        self.trials.append(Trial(("dead channels",), 0.0, drop, allowed))
        return (live, drop) if drop < allowed else (whole, 0.0)

    def bisect(self, unit: tuple[str, ...], keep: Tensor, drop: float, allowed: float) -> tuple[Tensor, float]:
        """The best mask for this unit, and its drop."""
        groups = tuple(self._calibration.structure.group(name) for name in unit)
        low, high = 0.0, 1.0
        for _ in range(self._calibration.settings.steps):
            sparsity = (low + high) / 2
            candidate = self._widths.keep(groups, 1 - sparsity, keep)
            trial = Trial(unit, 1 - sparsity, self._drop(candidate), allowed)
            self.trials.append(trial)
            if trial.accepted:
                low, best, drop = sparsity, candidate, trial.drop
            else:
                high = sparsity
        return (best if low > 0 else keep), drop

    def _drop(self, keep: Tensor) -> float:
        candidate = apply(self._model, self._compensator.plan(keep))
        try:
            return self.base - self._evaluate(candidate)
        except RuntimeError as error:  # raised by torch inside the candidate, or by the caller's measure
            raise VerificationError(
                f"a candidate could not be measured ({str(error)[:200]}). If your measure runs on the original model, "
                "please report the model: its code depends on sizes in a way that was not seen."
            ) from error


def _ordered(units: list[tuple[str, ...]], settings: Settings) -> list[tuple[str, ...]]:
    if settings.order == "top-down":
        return units[::-1]
    if settings.order == "random":
        generator = torch.Generator().manual_seed(settings.seed)
        return [units[i] for i in torch.randperm(len(units), generator=generator).tolist()]
    return units


def _read_by_last_layer(structure: Structure) -> set[str]:
    """Groups read by a layer whose outputs the model returns as they are, not joined with anything else."""
    last = {group.producers[0] for group in structure.groups if group.returned and len(group.producers) == 1}
    return {group.name for group in structure.groups if any(reader in last for reader in group.consumers)}
