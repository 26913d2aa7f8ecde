"""Channels that were constant: counted, told, and gone only where channels are asked to go."""

import re

import pytest
import torch
from torch import nn

import recoup
from recoup.statistics.constant import constant_channels

METHODS = ["best", "fast", recoup.Paper(classifier=True), recoup.Released(classifier=True)]
methods = pytest.mark.parametrize("method", METHODS, ids=["best", "fast", "paper", "released"])


def network(constant=4, width=16):
    """Two convolutions; the first channels of the first never pass the activation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(16, 10))
    model[0].bias.data[:constant] -= 6
    return model.eval()


def images(count=160, seed=1):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def seen_of(model, batches, method=None):
    data = recoup.split(model, batches, held_out=False)
    return recoup.calibrate(recoup.trace(model, batches[0]), data, method or recoup.Paper())


@methods
def test_nothing_goes_when_all_widths_are_asked_for(method):
    result = recoup.prune(network(), [images()], budget=recoup.Budget(width=1.0), method=method)
    assert result.model[0].out_channels == 16
    assert (result.report.constant["0"].found, result.report.constant["0"].gone) == (4, 0)
    assert "4 channels were constant on the calibration images, 0 of them are gone" in str(result.report)
    assert result.report.to_json()["constant"]["0"] == {"found": 4, "gone": 0, "samples": 100}
    assert not result.report.warnings


@methods
@pytest.mark.parametrize("of", ["macs", "parameters"])
def test_nothing_goes_when_all_of_a_budget_is_asked_for(method, of):
    result = recoup.prune(network(), [images()], budget=recoup.Budget(**{of: 1.0}), method=method)
    assert [group.after for group in result.report.groups] == [16, 16, 10]


@methods
def test_constant_channels_are_the_first_to_go(method):
    result = recoup.prune(network(), [images()], budget=recoup.Budget(width=0.75), method=method)
    assert not result.plan.keep["0"][:4].any() and result.plan.keep["0"][4:].all()
    assert (result.report.constant["0"].found, result.report.constant["0"].gone) == (4, 4)
    assert not result.report.warnings  # a quarter of the group, on enough images


@methods
def test_a_group_does_not_collapse_on_images_that_are_all_alike(method):
    flat = [torch.full((64, 3, 8, 8), 0.5)] * 2
    with pytest.warns(recoup.RecoupWarning, match="constant on the calibration images; only [01] different ones"):
        result = recoup.prune(network(0), flat, budget=recoup.Budget(macs=0.5), method=method)
    assert all(group.after >= group.before // 2 for group in result.report.groups)


@pytest.mark.parametrize("method", ["best", "fast", recoup.Paper(classifier=True)])
def test_within_a_tolerance_constant_channels_go_where_there_were_enough_samples(method):
    def evaluate(model):
        return 90.0 - max(0, 12 - model[0].out_channels) - (16 - model[2].out_channels)

    found = recoup.prune(network(), [images()], tolerance=0.5, evaluate=evaluate, method=method)
    assert (found.model[0].out_channels, found.model[2].out_channels) == (12, 16)
    few = recoup.prune(network(), [images(10)], tolerance=0.5, evaluate=evaluate, method=method)
    assert few.model[0].out_channels >= 12


def test_most_of_a_group_is_told_of():
    with pytest.warns(recoup.RecoupWarning, match=re.escape("(0: 8 of 16). What they do on other images is not")):
        recoup.prune(network(9), [images()], budget=recoup.Budget(width=0.5), method="paper")


def test_channels_that_vary_before_an_activation_that_never_opens_are_not_taken_for_constant():
    model = network(0)
    model[2].bias.data -= 100
    seen = seen_of(model, [images()])
    constants = constant_channels(seen)
    first, second = seen.structure.prunable
    assert constants.found(first) == 0
    assert (constants.found(second), constants.vouched(second), constants.samples[second.name]) == (16, 16, 100)


@pytest.mark.parametrize(("batches", "different"), [([images(30)], 30), ([images(30)] * 9, 30), ([images(300)], 100)])
def test_samples_that_vouch_are_different_ones(batches, different):
    seen = seen_of(network(), batches, recoup.Paper(weighting="none"))
    assert constant_channels(seen).samples == {"0": different, "2": different}
    assert seen.different == different
