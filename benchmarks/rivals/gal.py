"""GAL: generative adversarial learning of soft masks (Lin et al. 2019, arXiv 1903.09291).

A mask m has a factor for every channel. A discriminator D is to tell the scores f_b of the baseline from the scores
f_m of the masked network, which is to deceive it:

    min_{W, m} max_D  log D(f_b) + log(1 - D(f_m)) + mu/2 ||f_b - f_m||^2 + lambda ||m||_1

Labels play no part. W and D take steps of SGD, m those of FISTA: m <- max(y - a grad - a lambda, 0), where y runs ahead
of m along its last step. Channels whose factor is zero go; then the network is fine-tuned with labels.

From the authors' code: 100 epochs at rate 0.01 and decay 2e-4, mu = 1, a step of the mask on every 200th batch, factors
never below zero, and in the loss of D a term -log D(f_m) that holds it back. The L1 norm acts there by its gradient and
by the threshold, so our lambda of 0.1 is the 0.05 of GAL-0.05.

Ours: factors start at one, not at draws from a normal distribution, half of which are cut off by the first step; the
200 batches are counted through all epochs; y is what the network has while it trains, and the rate of m falls along the
cosine of the others; mu is halved. D has hidden layers of 128, 256 and 128 units with ReLUs, as in the paper, and one
logit; in the code it is linear with 128 of them. The learning ends once what is not zero fits the budget. Where the
epochs run out first, the factors decide, each against the largest of its group, for the scales of groups drift apart.
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
from benchmarks.rivals.training import Batch, Schedule, batches, descend, finetuned, narrow, seeded, sgd
from recoup.channels.cost import macs_by_product
from recoup.config import require_whole

# The published schedules, or ours where the docstring says so.
MASKS = Schedule(epochs=100, rate=0.01, decay=2e-4)
TUNING = Schedule(epochs=100, rate=0.01, decay=2e-4)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, the weights of L1 norm and data, batches per step of the mask, the schedules."""

    share: float = 0.5
    sparsity: float = 0.1
    data: float = 1.0
    mask_every: int = 200
    masks: Schedule = MASKS
    tuning: Schedule = TUNING

    def __post_init__(self) -> None:
        require_whole("mask_every", self.mask_every)
        require_whole("masks.epochs", self.masks.epochs)


@dataclass(slots=True, eq=False)
class Fista:
    """Proximal steps with Nesterov's acceleration: `value` is the mask, `ahead` is where gradients are taken."""

    value: Tensor
    ahead: Tensor
    momentum: float = 1.0

    def step(self, gradient: Tensor, rate: float, sparsity: float, free: Tensor) -> None:
        """Move along the gradient, shrink by rate * sparsity, run ahead; channels that are not free stay."""
        moved = self.ahead.detach() - rate * gradient
        shrunk = torch.where(free, (moved - rate * sparsity).clamp(min=0), 1.0)
        following = (1 + math.sqrt(1 + 4 * self.momentum**2)) / 2
        ahead = shrunk + (self.momentum - 1) / following * (shrunk - self.value)
        # A factor that has come to zero is not carried past it by its momentum.
        self.ahead = ahead.clamp(min=0).requires_grad_()
        self.value, self.momentum = shrunk, following


@dataclass(frozen=True, slots=True, eq=False)
class Contest:
    """The masked network against the discriminator: both, what the first is to equal, and their optimisers."""

    subject: Subject
    baseline: nn.Module
    judge: nn.Module
    own: torch.optim.Optimizer
    opposing: torch.optim.Optimizer
    data: float

    def play(self, mask: Tensor, batch: Batch) -> Tensor:
        """The gradient of the mask (channels,) on a batch, after a step of both sides on it."""
        mask.grad = None
        with narrow(batch.images.device):
            with torch.no_grad():
                true = self.baseline(batch.images).float()
            scores = gated(self.subject, mask, batch.images)
        descend(self.opposing, partial(caught, self.judge, true, scores.detach()), batch)
        descend(self.own, partial(deceived, self.judge, true, scores, self.data), batch)
        assert mask.grad is not None
        return mask.grad


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of masks, cut and tuning."""
    seconds: dict[str, float] = {}
    subject = timed(seconds, "trace", lambda: subject_of(model, images, settings.share))
    mask = timed(seconds, "masks", lambda: learnt_mask(subject, images, labels, settings))
    score = worth(subject, mask)
    keep = keep_first(subject.structure, best_first(subject.structure, score), counts_by_score(subject, score))
    fold(subject, mask)
    smaller = timed(seconds, "cut", lambda: cut(subject, keep))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds


def worth(subject: Subject, mask: Tensor) -> Tensor:
    """The score (channels,): a factor as a share of the largest of its group; among zeros the larger filters lead."""
    norms = filter_norms(subject.structure, subject.model)
    score = 1e-9 * norms / norms.max()  # far below any other difference
    for group in subject.groups:
        own = mask[group.channels].cpu().double()
        score[group.channels] += own / own.max().clamp(min=1e-12)  # all may be zero
    return score


def learnt_mask(subject: Subject, images: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """The mask (channels,) that survives; the subject's weights have learnt with it."""
    free, ones = subject.free.to(images.device), torch.ones(subject.structure.width, device=images.device)
    fista = Fista(ones, ones.clone().requires_grad_())
    with seeded(settings.masks.seed), torch.enable_grad():
        contest = contest_of(subject, images[:1], settings)
        for number, batch in enumerate(batches(images, labels, settings.masks), start=1):
            gradient = contest.play(fista.ahead, batch)
            if number % settings.mask_every == 0:
                fista.step(gradient, batch.rate, settings.sparsity, free)
            if batch.ends_epoch and remaining_macs(subject, fista.value) <= subject.allowed:
                break
    subject.model.eval()
    return fista.value


def contest_of(subject: Subject, example: Tensor, settings: Settings) -> Contest:
    """Both sides at their start: the subject's model, in training mode, and a fresh discriminator."""
    baseline = copy.deepcopy(subject.model).eval()
    with torch.no_grad():
        classes = baseline(example).shape[1]
    judge = discriminator(classes).to(example.device)
    own, opposing = (sgd(each.parameters(), settings.masks) for each in (subject.model.train(), judge))
    return Contest(subject, baseline, judge, own, opposing, settings.data)


def remaining_macs(subject: Subject, mask: Tensor) -> int:
    """The MACs without the channels whose factor is zero."""
    keep = (mask != 0).cpu() | ~subject.free
    return sum(macs_by_product(subject.structure, keep).values())


def discriminator(classes: int) -> nn.Sequential:
    """From the scores of a network to the logit of their being the baseline's."""
    sizes = (classes, 128, 256, 128)
    hidden = [part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))


def caught(judge: nn.Module, true: Tensor, scores: Tensor) -> Tensor:
    """What the discriminator is to make small: its errors on the baseline's scores and on the others, held back."""
    return told(judge, true, 1) + told(judge, scores, 0) + told(judge, scores, 1)


def deceived(judge: nn.Module, true: Tensor, scores: Tensor, data: float) -> Tensor:
    """What the masked network is to make small: its distance from the baseline, and its being told from it."""
    return data / 2 * (scores - true).square().mean() + told(judge, scores, 1)


def told(judge: nn.Module, scores: Tensor, truth: int) -> Tensor:
    """The cross-entropy of the discriminator when `truth` is 1 for the baseline's scores and 0 for others."""
    logits = judge(scores).float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))
