import math
from statistics import NormalDist

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import recoup
from recoup.errors import CalibrationError
from recoup.judge.acceptance import ImageAcceptance, ScoreAcceptance


class Known(nn.Module):
    """Answers 1 where its inputs are above a threshold, otherwise 0."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(float(threshold)))

    def forward(self, x):
        return torch.stack([torch.zeros(len(x)), x[:, 0] - self.threshold], dim=1)


def inputs(count):
    """Evenly spread in (0, 1), in batches of ten."""
    return list(((torch.arange(count) + 0.5) / count)[:, None].split(10))


def labelled(count, threshold=0.0):
    """Right is to answer 1 above the threshold."""
    return [(x, (x[:, 0] > threshold).long()) for x in inputs(count)]


thresholds = st.floats(0.0, 1.0)


@given(thresholds, thresholds)
@settings(max_examples=60, deadline=None)
def test_with_labels_the_drop_is_the_difference_of_accuracies(before, after):
    batches = labelled(50, 0.3)
    model, candidate = Known(before), Known(after)
    acceptance = ImageAcceptance(model, batches, 0.95)
    verdict = acceptance(candidate)
    assert acceptance.base == pytest.approx(recoup.accuracy(model, batches))
    assert verdict.score == pytest.approx(recoup.accuracy(candidate, batches))
    assert verdict.drop == pytest.approx(acceptance.base - verdict.score, abs=1e-9)


@given(thresholds, thresholds, st.booleans(), st.floats(0.5, 0.999))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_never_below_the_drop(before, after, is_labelled, confidence):
    batches = labelled(50, 0.3) if is_labelled else inputs(50)
    verdict = ImageAcceptance(Known(before), batches, confidence)(Known(after))
    assert verdict.bound >= verdict.drop


@given(thresholds, thresholds)
@settings(max_examples=60, deadline=None)
def test_without_labels_it_is_the_agreement_with_the_original(before, after):
    acceptance = ImageAcceptance(Known(before), inputs(50), 0.95)
    verdict = acceptance(Known(after))
    x = torch.cat(inputs(50))[:, 0]
    same = ((x > before) == (x > after)).double().mean()
    assert acceptance.base == 100.0
    assert verdict.score == pytest.approx(100 * float(same))
    assert verdict.drop == pytest.approx(100 - 100 * float(same))


def test_the_bound_of_a_known_case():
    """Ten of a hundred images are lost: the differences have mean 0.1 and deviation 0.3."""
    verdict = ImageAcceptance(Known(0.0), labelled(100), 0.95)(Known(0.1))
    assert (verdict.score, verdict.drop) == (pytest.approx(90), pytest.approx(10))
    z = NormalDist().inv_cdf(0.95)
    assert verdict.bound == pytest.approx(10 + z * 100 * math.sqrt((0.3**2 + z**2 / 100) / 100))


def test_images_won_count_against_images_lost():
    """The candidate is wrong below 0.2 and right from 0.2 to 0.3, where the original is wrong."""
    verdict = ImageAcceptance(Known(0.3), labelled(100, 0.2), 0.95)(Known(0.2))
    assert verdict.drop == pytest.approx(-10)
    assert verdict.score == pytest.approx(100)
    both = ImageAcceptance(Known(0.3), labelled(100, 0.2), 0.95)(Known(0.1))
    assert both.drop == pytest.approx(0)
    assert both.bound == pytest.approx(1.6449 * 100 * math.sqrt(0.2 + 1.6449**2 / 100) / 10, rel=1e-3)  # ten each


def test_the_bound_shrinks_with_the_root_of_the_number_of_images():
    bounds = []
    for count in (100, 400, 1600):
        verdict = ImageAcceptance(Known(0.0), labelled(count), 0.95)(Known(0.1))
        assert verdict.drop == pytest.approx(10)
        bounds.append(verdict.bound - verdict.drop)
    assert bounds == [pytest.approx(bounds[0]), *(pytest.approx(bounds[0] / n, rel=0.15) for n in (2, 4))]


def test_the_bound_grows_with_the_confidence():
    bounds = [ImageAcceptance(Known(0.0), labelled(100), c)(Known(0.1)).bound for c in (0.5, 0.9, 0.99)]
    assert bounds == sorted(bounds)
    assert bounds[0] == pytest.approx(10)  # even odds: the drop itself
    assert len(set(bounds)) == 3


def test_the_same_network_has_lost_nothing():
    verdict = ImageAcceptance(Known(0.4), inputs(30), 0.95)(Known(0.4))
    assert (verdict.score, verdict.drop) == (100.0, 0.0)


@pytest.mark.parametrize("count", [30, 1000])
def test_images_without_a_difference_promise_about_what_the_rule_of_three_does(count):
    verdict = ImageAcceptance(Known(0.4), inputs(count), 0.95)(Known(0.4))
    assert verdict.bound == pytest.approx(100 * 3 / count, rel=0.15)


def test_the_bound_holds_about_as_often_as_it_says():
    """Samples of 400 images from a population in which every other one is lost."""
    generator = torch.Generator().manual_seed(0)
    holds = 0
    for _ in range(200):
        x = torch.rand(400, 1, generator=generator)
        acceptance = ImageAcceptance(Known(0.0), [(x, torch.ones(400, dtype=torch.long))], 0.9)
        holds += acceptance(Known(0.5)).bound >= 50
    assert 0.84 < holds / 200 < 0.96


def test_images_must_be_readable_again():
    with pytest.raises(CalibrationError, match="validation is an iterator that can be read only once"):
        ImageAcceptance(Known(0.0), iter(inputs(20)), 0.95)


def test_modes_of_the_models_are_as_before():
    model, candidate = Known(0.0).train(), Known(0.1).train()
    ImageAcceptance(model, inputs(20), 0.95)(candidate)
    assert model.training
    assert candidate.training


def test_a_measure_is_taken_at_its_word():
    acceptance = ScoreAcceptance(Known(0.0), lambda model: 80 - 10 * model.threshold.item())
    verdict = acceptance(Known(0.5))
    assert acceptance.base == 80.0
    assert (verdict.score, verdict.drop, verdict.bound) == (75.0, 5.0, 5.0)
    better = acceptance(Known(-1.0))
    assert (better.drop, better.bound) == (-10.0, -10.0)


class Shuffled:
    """The same batches, in another order every time they are read."""

    def __init__(self, batches, of_batches=True):
        self.batches, self.of_batches, self.generator = batches, of_batches, torch.Generator().manual_seed(0)

    def __iter__(self):
        if self.of_batches:
            return iter([self.batches[i] for i in torch.randperm(len(self.batches), generator=self.generator)])
        orders = [torch.randperm(len(x), generator=self.generator) for x, _ in self.batches]
        return iter([(x[order], y[order]) for (x, y), order in zip(self.batches, orders, strict=True)])


@pytest.mark.parametrize("of_batches", [True, False])
def test_images_in_another_order_are_refused(of_batches):
    batches = Shuffled(labelled(100, 0.3), of_batches)
    acceptance = ImageAcceptance(Known(0.3), batches, 0.95)
    assert acceptance.base == 100.0  # labels and answers are of the same pass
    with pytest.raises(CalibrationError, match="another order"):
        acceptance(Known(0.3))


def test_other_images_are_refused():
    class Noisy:
        def __iter__(self):
            return iter([x + 0.001 * torch.rand(1) for x in inputs(20)])

    acceptance = ImageAcceptance(Known(0.3), Noisy(), 0.95)
    with pytest.raises(CalibrationError, match="other images"):
        acceptance(Known(0.3))


def test_images_with_missing_values_are_the_same_images():
    x = torch.tensor([[0.1], [float("nan")], [0.9]])
    assert ImageAcceptance(Known(0.3), [x], 0.95)(Known(0.3)).drop == 0.0
