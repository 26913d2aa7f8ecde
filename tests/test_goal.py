import math

import pytest
import torch
from torch import nn

import recoup
from recoup import Budget, Goal
from recoup.errors import CalibrationError, UsageError
from recoup.methods.registry import acceptance_for, find_method, require_possible

HALF = Budget(macs=0.5)


def goal(tolerance=None, budget=None, validation=None, evaluate=None, method="best"):
    wanted = Goal(tolerance, budget, validation, evaluate)
    require_possible(wanted, find_method(method))
    return wanted


def base_of(wanted):
    """What the model scores by the measure of a goal."""
    model = nn.Linear(3, 2)
    data = recoup.split(model, [torch.randn(20, 3)])
    return lambda: acceptance_for(model, wanted, recoup.Best(), data).base


@pytest.mark.parametrize("given", [{}, {"tolerance": 1.0, "budget": HALF}])
def test_either_a_tolerance_or_a_budget_is_asked_for(given):
    with pytest.raises(UsageError, match="give either a tolerance, in points, or a budget"):
        goal(**given)


@pytest.mark.parametrize("tolerance", [0, -1.0, math.nan])
def test_a_tolerance_is_above_nothing(tolerance):
    with pytest.raises(UsageError, match=f"tolerance must be above 0 points, got {tolerance}"):
        goal(tolerance)


def test_a_tolerance_has_an_end():
    with pytest.raises(UsageError, match="a tolerance without end allows anything"):
        goal(math.inf)


def test_there_is_one_measure():
    with pytest.raises(UsageError, match="give either validation= or evaluate=, not both"):
        goal(1.0, validation=[torch.randn(2, 3)], evaluate=lambda _: 1.0)


@pytest.mark.parametrize("refine", [-1.0, math.inf, math.nan])
def test_refinement_takes_some_seconds(refine):
    with pytest.raises(UsageError, match="refine must be a number of seconds, 0 or more"):
        recoup.Best(refine=refine)


def test_validation_is_read_more_than_once():
    with pytest.raises(CalibrationError, match="validation is an iterator that can be read only once"):
        goal(1.0, validation=iter([torch.randn(2, 3)]))


@pytest.mark.parametrize("method", ["paper", "released"])
def test_the_published_search_needs_something_to_measure(method):
    with pytest.raises(UsageError, match="a tolerance needs something to measure.*method='best'"):
        goal(1.0, method=method)
    assert goal(1.0, evaluate=lambda _: 1.0, method=method).tolerance == 1.0
    assert goal(budget=HALF, method=method).budget == HALF


@pytest.mark.parametrize("method", ["paper", "released"])
def test_the_published_search_knows_no_time(method):
    with pytest.raises(UsageError, match="a latency budget needs widths that are measured.*method='best' or 'fast'"):
        goal(budget=Budget(latency=0.5), method=method)
    assert goal(budget=Budget(latency=0.5)).budget.of == "latency"


@pytest.mark.parametrize("method", ["best", "fast"])
def test_the_measured_ones_can_do_without(method):
    assert goal(1.0, method=method).validation is None


def test_the_measure_is_the_callers_or_accuracy():
    assert base_of(goal(1.0, evaluate=lambda _: 42))() == 42.0
    model, x = nn.Linear(3, 2), torch.randn(10, 3)
    data = recoup.split(model, [x])
    labels = model(x).argmax(1)
    for given, expected in ((labels, 100.0), (1 - labels, 0.0)):
        wanted = goal(budget=HALF, validation=[(x, given)])
        assert acceptance_for(model, wanted, recoup.Best(), data).base == expected


def test_a_measure_that_is_no_number_is_refused():
    with pytest.raises(CalibrationError, match="must return a finite number of points, it returned 'good'"):
        base_of(goal(1.0, evaluate=lambda _: "good"))()


def test_widths_by_hand_are_a_goal_of_their_own():
    assert Goal(widths={"conv1": 8}).widths == {"conv1": 8}
    with pytest.raises(UsageError, match=r"widths\['conv1'\] must be a whole number of at least 1, got 0"):
        Goal(widths={"conv1": 0})
    with pytest.raises(UsageError, match="min_width must be a whole number of at least 1, got 0"):
        Goal(budget=HALF, min_width=0)
