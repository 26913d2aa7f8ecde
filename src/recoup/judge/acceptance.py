"""What a candidate has lost, and how much it may have lost given that only so many images were looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup.errors import CalibrationError, RecoupError, VerificationError, told
from recoup.graph.copies import duplicate
from recoup.inputs.batches import require_repeatable
from recoup.judge.accuracy import Evaluate, read_answers
from recoup.judge.chance import warn_at_chance


@dataclass(frozen=True, slots=True)
class Verdict:
    """Points lost on the images that were looked at, and an upper bound for images that were not.

    `top5` is the accuracy that counts a label among the five largest outputs, where there is one.
    """

    score: float
    drop: float
    bound: float
    top5: float | None = None


class Acceptance(Protocol):
    """Knows what the original scores, in points, and compares candidates with it."""

    base: float
    what: str
    top5: float | None

    def require_enough(self, tolerance: float) -> None:
        """Refuse a tolerance that not even the original could be seen to keep."""
        ...

    def __call__(self, candidate: nn.Module, /) -> Verdict:
        """What the candidate has lost."""
        ...


class ScoreAcceptance:
    """The caller's own number: nothing is known of its error, so the bound is the drop itself."""

    what = "score"
    top5: float | None = None

    def __init__(self, model: nn.Module, measure: Evaluate) -> None:
        self._measure = measure
        self.base = _score_of_original(model, measure)

    def require_enough(self, tolerance: float) -> None:
        """Any tolerance can be seen to be kept."""

    def __call__(self, candidate: nn.Module, /) -> Verdict:
        """What the measure says."""
        score = self._measure(candidate)
        return Verdict(score, self.base - score, self.base - score)


class ImageAcceptance:
    """Accuracy on labelled images; on unlabelled ones agreement with the original's own answers, whose base is 100.

    The drop is a mean of differences between two networks on the same n images, -1, 0 or 1 each. By the central limit
    theorem the drop on all images lies below mean + z · √(variance / n) with probability `confidence`; z² / n is added
    to the variance, so that n images without a difference promise no more than they can.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], confidence: float) -> None:
        require_repeatable(batches, "validation")
        self._batches, self._confidence, self._z = batches, confidence, NormalDist().inv_cdf(confidence)
        first = read_answers(duplicate(model), batches)
        self.what = "agreement" if first.labels is None else "accuracy"
        self._marks, self._truth = first.marks, first.answers if first.labels is None else first.labels
        self._right = first.answers == self._truth
        self.base, self.top5 = 100.0 * float(self._right.double().mean()), first.top5
        if first.labels is not None:
            warn_at_chance(first.answers, first.labels, first.classes)

    def require_enough(self, tolerance: float) -> None:
        """Refuse a tolerance below the bound of no difference at all.

        Raises:
            CalibrationError: there are too few images.
        """
        least, count = 100 * self._z**2 / len(self._right), len(self._right)
        if least < tolerance:
            return
        raise CalibrationError(
            f"{count} images cannot tell with {self._confidence:.0%} confidence that less than {tolerance:g} points "
            f"are lost: even if no answer changed on them, {least:.2f} might be. Give at least "
            f"{math.floor(100 * self._z**2 / tolerance) + 1} validation images, a larger tolerance, or a method with "
            "less confidence."
        )

    def __call__(self, candidate: nn.Module, /) -> Verdict:
        """Points lost, and the bound on them."""
        reading = read_answers(candidate, self._batches, is_candidate=True)
        if not torch.equal(reading.marks, self._marks):
            raise CalibrationError(
                "validation gives other images, or the same in another order, when it is read again, so that two "
                "networks cannot be compared on it. Turn shuffling and random augmentation off, or give a list of "
                "batches."
            )
        right = reading.answers == self._truth
        lost = self._right.double() - right.double()
        score, drop, bound = 100 * float(right.double().mean()), 100 * float(lost.mean()), 100 * self._bound(lost)
        return Verdict(score, drop, bound, reading.top5)

    def _bound(self, lost: Tensor) -> float:
        variance = float(lost.var(correction=0)) + self._z**2 / len(lost)
        return float(lost.mean()) + self._z * math.sqrt(variance / len(lost))


def _score_of_original(model: nn.Module, measure: Evaluate) -> float:
    """What the caller's measure says of the caller's model, which it may leave in another mode."""
    training = [(module, module.training) for module in model.modules()]
    try:
        return measure(model)
    except RecoupError:
        raise
    except Exception as error:  # user code
        raise CalibrationError(
            f"evaluate(model) failed on the original model ({told(error)}). It has to return its points."
        ) from error
    finally:
        for module, was_training in training:
            module.training = was_training


def judged(acceptance: Acceptance, candidate: nn.Module) -> Verdict:
    """What the acceptance says of a candidate.

    Raises:
        VerificationError: the candidate cannot be run, or the caller's measure fails on it.
    """
    try:
        return acceptance(candidate)
    except RecoupError:
        raise
    except Exception as error:  # raised by torch inside the candidate, or by the caller's measure
        raise VerificationError(
            f"a candidate could not be measured ({str(error)[:200]}). If your measure runs on the original model, "
            "please report the model: its code depends on sizes in a way that was not seen."
        ) from error
