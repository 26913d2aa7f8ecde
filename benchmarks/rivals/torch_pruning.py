"""Torch-Pruning as its users take it (Fang et al. 2023, arXiv 2301.12900): group L2 norms, one step, fine-tuning.

The pruning is benchmarks/baselines.py: the same ratio for all groups, the largest one within the budget; the last
linear layer stays whole. The library leaves fine-tuning to its users; rate and epochs are ours. Its users know their
ratio, so the seconds leave out the search for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.baselines import torch_pruned, torch_pruning_ratio
from benchmarks.machine import timed
from benchmarks.rivals.channels import Pruned
from benchmarks.rivals.training import Schedule, finetuned

# The published schedules, or ours where the docstring says so.
TUNING = Schedule(epochs=100, rate=0.01)


@dataclass(frozen=True, slots=True)
class Settings:
    """The share of the MACs to keep, and the training after the cut."""

    share: float = 0.5
    tuning: Schedule = TUNING


def prune(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> Pruned:
    """The smaller network, and the seconds of cut and tuning.

    Raises:
        ModelError: torch-pruning is not installed.
    """
    seconds: dict[str, float] = {}
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    ratio = torch_pruning_ratio(model, images[:1], settings.share, ignored=last)
    smaller = timed(seconds, "cut", lambda: torch_pruned(model, images[:1], last, ratio))
    return timed(seconds, "tuning", lambda: finetuned(smaller, images, labels, settings.tuning)), seconds
