import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from recoup.errors import CalibrationError, UsageError
from recoup.goal import Goal
from recoup.settings import PRESETS, Budget

HALF = Budget(macs=0.5)


def goal(tolerance=None, budget=None, validation=None, evaluate=None, refine=0.0, preset="best"):
    return Goal(tolerance, budget, validation, evaluate, refine, PRESETS[preset])


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
        goal(budget=HALF, refine=refine)


def test_validation_is_read_more_than_once():
    with pytest.raises(CalibrationError, match="validation is an iterator that can be read only once"):
        goal(1.0, validation=iter([torch.randn(2, 3)]))


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_the_published_search_needs_something_to_measure(preset):
    with pytest.raises(UsageError, match="a tolerance needs something to measure.*preset='best'"):
        goal(1.0, preset=preset)
    assert goal(1.0, evaluate=lambda _: 1.0, preset=preset).tolerance == 1.0
    assert goal(budget=HALF, preset=preset).budget == HALF


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_the_published_search_knows_no_time(preset):
    with pytest.raises(UsageError, match="a latency budget needs widths that are measured.*preset='best' or 'fast'"):
        goal(budget=Budget(latency=0.5), preset=preset)
    assert goal(budget=Budget(latency=0.5)).budget.of == "latency"


@pytest.mark.parametrize("preset", ["best", "fast"])
def test_the_measured_one_can_do_without(preset):
    assert goal(1.0, preset=preset).measure is None


def test_the_measure_is_the_callers_or_accuracy():
    model = nn.Linear(3, 2)
    assert goal(1.0, evaluate=lambda _: 42).measure(model) == 42.0
    x = torch.randn(10, 3)
    labels = model(x).argmax(1)
    assert goal(budget=HALF, validation=[(x, labels)]).measure(model) == 100.0
    assert goal(budget=HALF, validation=[(x, 1 - labels)]).measure(model) == 0.0


def test_a_measure_that_is_no_number_is_refused():
    with pytest.raises(CalibrationError, match="must return a finite number of points, it returned 'good'"):
        goal(1.0, evaluate=lambda _: "good").measure(nn.Linear(3, 2))


def test_settings_of_ones_own_are_taken():
    settings = replace(PRESETS["fast"], joint=1)
    assert Goal(1.0, None, None, None, 0.0, settings).settings.joint == 1
