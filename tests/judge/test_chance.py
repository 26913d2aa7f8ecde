import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup.judge.acceptance import ImageAcceptance
from recoup.judge.chance import warn_at_chance


def answers(share, count, classes, seed=0):
    """Labels, and answers of which that share is right and the others are wrong."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draw)
    wrong = (labels + torch.randint(1, classes, (count,), generator=draw)) % classes
    is_right = torch.rand(count, generator=draw) < share
    return torch.where(is_right, labels, wrong), labels


@pytest.mark.parametrize(
    ("share", "count", "classes"), [(0.1, 1000, 10), (0.0, 1000, 10), (0.1, 100, 10), (0.5, 300, 2), (0.0, 30, 1000)]
)
def test_a_score_at_chance_or_below_is_told(share, count, classes):
    given, labels = answers(share, count, classes)
    score = 100 * float((given == labels).double().mean())
    with pytest.warns(recoup.RecoupWarning, match=rf"scores {score:.1f} % of {classes} classes, .* order of classes"):
        warn_at_chance(given, labels, classes)


@pytest.mark.parametrize(
    ("share", "count", "classes"), [(0.2, 1000, 10), (0.7, 1000, 2), (0.1, 19, 10), (0.0, 25, 2), (0.1, 100, 1000)]
)
def test_a_better_score_is_not_told_nor_one_of_few_images(share, count, classes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_at_chance(*answers(share, count, classes), classes)


def test_hardly_any_network_at_chance_goes_by():
    found = 0
    for seed in range(100):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_at_chance(*answers(0.1, 500, 10, seed), 10)
        found += bool(caught)
    assert found >= 98


def test_classes_in_another_order_are_found_out():
    given, labels = answers(0.93, 1000, 10)
    with pytest.warns(recoup.RecoupWarning, match=r"scores 0\..*another order it would score 9\d\.\d %"):
        warn_at_chance((given + 3) % 10, labels, 10)


def test_no_order_is_promised_where_none_is_better():
    with pytest.warns(recoup.RecoupWarning) as caught:
        warn_at_chance(*answers(0.1, 100, 10), 10)
    assert "another order" not in str(caught[0].message)


def test_one_answer_to_everything_is_told():
    labels = (torch.arange(100) >= 80).long()
    with pytest.warns(recoup.RecoupWarning, match="gives all 100 labelled images the class 0"):
        warn_at_chance(torch.zeros(100, dtype=torch.long), labels, 2)


def test_the_original_is_looked_at_before_the_work():
    """One-hot inputs, of which the network reads its answer."""
    model, labels = nn.Linear(10, 10, bias=False), torch.arange(200) % 10
    nn.init.eye_(model.weight)
    inputs = torch.eye(10)[labels]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ImageAcceptance(model, [(inputs, labels)], 0.95).base == 100
    with pytest.warns(recoup.RecoupWarning, match="scores 0.0 % of 10 classes.*would score 100.0 %"):
        ImageAcceptance(model, [(inputs, (labels + 1) % 10)], 0.95)
