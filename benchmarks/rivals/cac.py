"""CAC: channel pruning by conditional accuracy change (Chen, Xu, Du, Liu, He 2020, IEEE TNNLS 32(2), 799-813).

Public to us is the abstract (doi 10.1109/TNNLS.2020.2979517): gates switch channels off at random while the network
trains; the change in accuracy under the condition that a channel is off says what it is worth; two criteria estimate it
at every iteration; channels of little worth are pruned gradually, early in the training. All details are our reading:

- gates are drawn anew for every batch, each off with the probability `off`;
- the change is that of the cross-entropy, which is finer than accuracy;
- criterion "sampled": mean loss of the batches with channel c off less that of the others,
      CAC_c = E[L | g_c = 0] - E[L | g_c = 1];
- criterion "gradient": the same to first order, CAC_c = E[-dL/dg_c | g_c = 1], for all channels from one backward pass;
- after each epoch the channels with the lowest CAC go, in whatever group, so that the MACs fall in a line to the
  share asked for; they do not come back. Sums are forgotten by half per epoch, since the network moves on.

The paper trains from nothing; here the network is a trained one, and is trained on after the cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import timed
from benchmarks.rivals.channels import Pruned, Subject, best_first, counts_by_score, cut, gated, keep_first, subject_of
from benchmarks.rivals.training import Batch, Schedule, batches, descend, finetuned, seeded, sgd
from recoup.config import require_whole
from recoup.errors import UsageError

CRITERIA = ("sampled", "gradient")
# The part of the sums that an epoch hands on to the next: ours.
MEMORY = 0.5
# The published schedules, or ours where the docstring says so.
PRUNING = Schedule(epochs=40, rate=0.01)
TUNING = Schedule(epochs=160, rate=0.01)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, the criterion, how often a gate is off, the schedules of pruning and tuning."""

    share: float = 0.5
    criterion: str = "gradient"
    off: float = 0.1
    pruning: Schedule = PRUNING
    tuning: Schedule = TUNING

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise UsageError(f"criterion='{self.criterion}' is not known. Take one of {', '.join(CRITERIA)}.")
        require_whole("pruning.epochs", self.pruning.epochs)


class Changes:
    """Running estimates of what the loss gains when a channel is off, by either criterion."""

    def __init__(self, channels: int, criterion: str, device: torch.device) -> None:
        self._criterion = criterion
        self._sums = torch.zeros(2, channels, dtype=torch.float64, device=device)  # off, on
        self._counts = torch.zeros_like(self._sums)

    def add(self, gate: Tensor, loss: Tensor, gradient: Tensor) -> None:
        """Take a batch into account: its gate (channels,) of ones and zeros, its loss, and the gradient of the gate."""
        states = torch.stack([1 - gate, gate]).double()
        self._sums += states * (loss.double() if self._criterion == "sampled" else -gradient.double())
        self._counts += states

    def estimate(self) -> Tensor:
        """The change (channels,); low for channels that are not missed."""
        means = self._sums / self._counts.clamp(min=1e-12)
        return means[0] - means[1] if self._criterion == "sampled" else means[1]

    def forget(self) -> None:
        """Let what was seen so far count for less."""
        self._sums *= MEMORY
        self._counts *= MEMORY


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of pruning, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    keep = timed(seconds, "pruning", lambda: gradually_pruned(subject, images, labels, settings))
    smaller = timed(seconds, "cut", lambda: cut(subject, keep))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def gradually_pruned(subject: Subject, images: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """Train the subject's model under random gates; the mask of the channels that are left at the end."""
    model, epochs, done = subject.model.train(), settings.pruning.epochs, 0
    keep = subject.structure.keep_all()
    changes = Changes(subject.structure.width, settings.criterion, images.device)
    with seeded(settings.pruning.seed), torch.enable_grad():
        optimiser = sgd(model.parameters(), settings.pruning)
        for batch in batches(images, labels, settings.pruning):
            step(subject, optimiser, batch, changes, keep, settings.off)
            if batch.ends_epoch:
                done += 1
                kept = 1 - (1 - settings.share) * done / epochs
                within = replace(subject, allowed=subject.allowed * kept / settings.share)
                keep = lowest_dropped(within, changes.estimate(), keep)
                changes.forget()
    model.eval()
    return keep


def step(
    subject: Subject, optimiser: torch.optim.Optimizer, batch: Batch, changes: Changes, keep: Tensor, off: float
) -> None:
    """Train on one batch with gates drawn at random, and see what they change."""
    drawn = keep & ~((torch.rand(len(keep)) < off) & subject.free)
    gate = drawn.to(batch.images.device, torch.float32).requires_grad_()
    loss = descend(optimiser, lambda: F.cross_entropy(gated(subject, gate, batch.images), batch.labels), batch)
    assert gate.grad is not None
    changes.add(gate.detach(), loss, gate.grad)


def lowest_dropped(subject: Subject, score: Tensor, keep: Tensor) -> Tensor:
    """The mask within the budget that drops the lowest scores; what was dropped before stays dropped."""
    last = torch.where(keep, score.cpu(), score.min().cpu() - 1)
    most = {group.name: int(keep[group.channels].sum()) for group in subject.groups}
    return keep_first(subject.structure, best_first(subject.structure, last), counts_by_score(subject, last, most))
