"""SFP: soft filter pruning (He et al. 2018, arXiv 1808.06866).

The network trains as usual. After every epoch, in each group, the filters with the smallest L2 norms are set to zero;
they train on and may grow back. After the last epoch the filters that are zero are cut off:

    keep_g = the n_g largest ||W_c||_2,   W_c <- 0 for c not in keep_g.

Published for CIFAR-10: 200 epochs, batches of 128, decay 5e-4; for a trained network a tenth of the usual rate of 0.1.
Ours: a cosine schedule; and since a batch norm still shifts a filter that is zero, batch norms behind the cut are
estimated again. The paper has no training after the cut, so `tuning` has no epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import filter_norms, is_ordinary, reestimated
from benchmarks.machine import timed
from benchmarks.rivals.channels import Pruned, Subject, best_first, counts_by_share, cut, keep_first, subject_of
from benchmarks.rivals.training import Schedule, finetuned, minimise
from recoup.config import require_whole

# Images per batch on which batch norms are estimated again.
ESTIMATION_BATCH = 1000
# The published schedules, or ours where the docstring says so.
TRAINING = Schedule(epochs=200, rate=0.01)
TUNING = Schedule(epochs=0, rate=0.01)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, the soft training, and the training after the cut."""

    share: float = 0.5
    training: Schedule = TRAINING
    tuning: Schedule = TUNING

    def __post_init__(self) -> None:
        require_whole("training.epochs", self.training.epochs)


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of training, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    keep = timed(seconds, "soft training", lambda: softly_trained(subject, images, labels, settings.training))
    smaller = timed(seconds, "cut", lambda: cut(subject, keep))
    estimation = [(part, part) for part in images.split(ESTIMATION_BATCH)]
    smaller = timed(seconds, "batch norm", lambda: reestimated(smaller, estimation))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def softly_trained(subject: Subject, images: Tensor, labels: Tensor, schedule: Schedule) -> Tensor:
    """Train the subject's model; the mask of the filters that are not zero after the last epoch."""
    counts = counts_by_share(subject, filter_norms(subject.structure, subject.model))
    model = subject.model.train()
    keep = [zero_smallest(subject, counts)]

    def after_epoch() -> None:
        keep[0] = zero_smallest(subject, counts)

    minimise(
        lambda x, y: F.cross_entropy(model(x).float(), y), model.parameters(), images, labels, schedule, after_epoch
    )
    model.eval()
    return keep[0]


def zero_smallest(subject: Subject, counts: dict[str, int]) -> Tensor:
    """Set to zero all but the largest filters of every group; the mask of those that are left."""
    norms = filter_norms(subject.structure, subject.model)
    keep = keep_first(subject.structure, best_first(subject.structure, norms), counts)
    makers = {f"{name}.weight" for name, module in subject.model.named_modules() if is_ordinary(module)}
    with torch.no_grad():
        for site in (site for site in subject.structure.sites if site.tensor in makers and site.dim == 0):
            weight = subject.model.get_parameter(site.tensor)
            weight[~subject.structure.keep_indices(site.channel_of, keep).to(weight.device)] = 0
    return keep
