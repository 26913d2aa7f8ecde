"""A network that answers no better than chance: labels, inputs or weights are wrong, and pruning it is in vain."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recoup.errors import warn

# Fewer labelled images tell nothing of a network.
FEWEST = 20
# Standard errors above chance from which a score is no accident.
ERRORS = 3.0
# Chance and that many errors must lie below this share of all images, or a good network could not be told from chance.
TELLING = 0.6


def warn_at_chance(answers: Tensor, labels: Tensor, classes: int) -> None:
    """Warn where answers (n,) to labels (n,) are no better than chance, or all the same; there are so many classes."""
    count = len(labels)
    if count < FEWEST or classes < 2:
        return
    right = float((answers == labels).double().mean())
    limit = _limit(count, classes)
    if limit < TELLING and right <= limit:
        better = _score_in_another_order(answers, labels, classes)
        order = "" if better is None else f" With the classes in another order it would score {100 * better:.1f} %."
        warn(
            f"the original scores {100 * right:.1f} % of {classes} classes, no more than chance: check the order of "
            f"classes, normalisation and weights.{order}"
        )
    elif len(answers.unique()) == 1 and len(labels.unique()) > 1:
        warn(
            f"the original gives all {count} labelled images the class {int(answers[0])}: check normalisation and "
            "weights."
        )


def _limit(count: int, classes: int) -> float:
    """The score that chance alone does not exceed on so many images."""
    chance = 1 / classes
    return chance + ERRORS * math.sqrt(chance * (1 - chance) / count)


def _score_in_another_order(answers: Tensor, labels: Tensor, classes: int) -> float | None:
    """The score with other names for the classes, if it is a good one: matched on half of the images, seen on the rest.

    The largest counts are matched first. That is not the best matching there is, but finds one that is nearly right.
    """
    answers, labels = answers.cpu(), labels.cpu()
    places = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # labels may be in any order
    matched, seen = places.tensor_split(2)
    pairs = answers[matched] * classes + labels[matched]
    numbers, counts = pairs.unique(return_counts=True)
    name_of = torch.full((classes,), -1)
    taken = set()
    for place in counts.argsort(descending=True, stable=True).tolist():
        answer, label = divmod(int(numbers[place]), classes)
        if name_of[answer] < 0 and label not in taken:
            name_of[answer] = label
            taken.add(label)
    right = float((name_of[answers[seen]] == labels[seen]).double().mean())
    return right if right > max(0.5, _limit(len(seen), classes)) else None
