"""GAL: generative adversarial learning of soft masks (Lin et al. 2019, arXiv 1903.09291).

A mask m has a factor for every channel. A discriminator D is to tell the scores f_b of the baseline from the scores
f_m of the masked network, which is to deceive it:

    min_{W, m} max_D  log D(f_b) + log(1 - D(f_m)) + mu/2 ||f_b - f_m||^2 + lambda ||m||_1

Labels play no part. W and D take steps of SGD, m those of FISTA: m <- soft(y - a grad, a lambda), where y runs ahead of
m along its last step. Channels whose factor is zero go; then the network is fine-tuned with labels.

From the authors' code: 100 epochs at rate 0.01 and decay 2e-4, mu = 1, D with hidden layers of 128, 256, 128 units;
lambda = 0.05 is that of GAL-0.05. Ours: m starts at one, FISTA restarts with every epoch, the learning ends once what
is not zero fits the budget, and the budget is met by the order of |m|, not by choosing lambda.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import filter_norms
from benchmarks.machine import timed
from benchmarks.rivals.channels import (
    Pruned,
    Subject,
    best_first,
    counts_by_score,
    cut,
    fold,
    gated,
    keep_first,
    subject_of,
)
from benchmarks.rivals.training import Schedule, batches, descend, finetuned, seeded, sgd
from recoup.channels.cost import macs_by_call

# The published schedules, or ours where the docstring says so.
MASKS = Schedule(epochs=100, rate=0.01, decay=2e-4)
TUNING = Schedule(epochs=100, rate=0.01, decay=2e-4)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, the weight of the L1 norm and of the data, the schedules of masks and tuning."""

    share: float = 0.5
    sparsity: float = 0.05
    data: float = 1.0
    masks: Schedule = MASKS
    tuning: Schedule = TUNING


@dataclass(slots=True, eq=False)
class Fista:
    """Proximal steps with Nesterov's acceleration: `value` is the mask, `ahead` is where gradients are taken."""

    value: Tensor
    ahead: Tensor
    momentum: float = 1.0

    def step(self, gradient: Tensor, rate: float, sparsity: float, free: Tensor) -> None:
        """Move along the gradient, shrink by rate * sparsity, run ahead; channels that are not free stay."""
        moved = self.ahead.detach() - rate * gradient
        shrunk = torch.where(free, moved.sign() * (moved.abs() - rate * sparsity).clamp(min=0), 1.0)
        following = (1 + math.sqrt(1 + 4 * self.momentum**2)) / 2
        ahead = shrunk + (self.momentum - 1) / following * (shrunk - self.value)
        # A factor that has come to zero is not carried past it by its momentum.
        self.ahead = torch.where(shrunk == 0, shrunk, ahead).requires_grad_()
        self.value, self.momentum = shrunk, following


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of masks, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    mask = timed(seconds, "masks", lambda: learnt_mask(subject, images, labels, settings))
    # Among factors of zero the larger filters are better: far below any other difference.
    norms = filter_norms(subject.structure, subject.model).to(mask.device)
    score = mask.abs().double() + 1e-9 * norms / norms.max()
    keep = keep_first(subject.structure, best_first(subject.structure, score), counts_by_score(subject, score))
    fold(subject, mask)
    smaller = timed(seconds, "cut", lambda: cut(subject, keep))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def learnt_mask(subject: Subject, images: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """The mask (channels,) that survives; the subject's weights have learnt with it."""
    baseline, free = copy.deepcopy(subject.model).eval(), subject.free.to(images.device)
    ones = torch.ones(subject.structure.width, device=images.device)
    fista = Fista(ones, ones.clone().requires_grad_())
    model = subject.model.train()
    with seeded(settings.masks.seed), torch.enable_grad():
        classes = baseline(images[:1]).shape[1]
        judge = discriminator(classes).to(images.device)
        weights, opponent = sgd(model.parameters(), settings.masks), sgd(judge.parameters(), settings.masks)
        for batch in batches(images, labels, settings.masks):
            with torch.no_grad():
                true = baseline(batch.images).float()
            scores = gated(subject, fista.ahead, batch.images)
            descend(opponent, partial(caught, judge, true, scores.detach()), batch)
            descend(weights, partial(deceived, judge, true, scores, settings.data), batch)
            gradient = fista.ahead.grad
            assert gradient is not None
            fista.step(gradient, batch.rate, settings.sparsity, free)
            if batch.ends_epoch:
                fista = Fista(fista.value, fista.value.clone().requires_grad_())
                if remaining_macs(subject, fista.value) <= subject.allowed:
                    break
    model.eval()
    return fista.value


def remaining_macs(subject: Subject, mask: Tensor) -> int:
    """The MACs without the channels whose factor is zero."""
    keep = (mask != 0).cpu() | ~subject.free
    return sum(macs_by_call(subject.structure, keep).values())


def discriminator(classes: int) -> nn.Sequential:
    """From the scores of a network to the logit of their being the baseline's."""
    sizes = (classes, 128, 256, 128)
    hidden = [part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))


def caught(judge: nn.Module, true: Tensor, scores: Tensor) -> Tensor:
    """What the discriminator is to make small: its errors on the baseline's scores and on the others."""
    return told(judge, true, 1) + told(judge, scores, 0)


def deceived(judge: nn.Module, true: Tensor, scores: Tensor, data: float) -> Tensor:
    """What the masked network is to make small: its distance from the baseline, and its being told from it."""
    return data / 2 * (scores - true).square().mean() + told(judge, scores, 1)


def told(judge: nn.Module, scores: Tensor, truth: int) -> Tensor:
    """The cross-entropy of the discriminator when `truth` is 1 for the baseline's scores and 0 for others."""
    logits = judge(scores).float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))
