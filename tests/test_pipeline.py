"""The steps of `prune`, one by one, and what a user may choose to leave alone."""

import math
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup import Budget, Goal
from recoup.errors import BudgetError, CalibrationError, LockedError, UsageError
from recoup.methods.registry import METHODS, find_method
from tests.test_methods import labelled, network_and_images

methods = pytest.mark.parametrize("method", METHODS)


def step_by_step(model, batches, goal, method):
    """What `prune` does, without it."""
    traced = recoup.trace(model, batches[0])
    data = recoup.split(model, batches, held_out=method.holds_out)
    are_scores = goal.validation is not None
    seen = recoup.calibrate(traced, data, method, are_scores=are_scores)
    rankings = recoup.rank(seen)
    allocation = recoup.allocate(seen, rankings, goal)
    recovered = recoup.recover(seen, allocation)
    smaller = recoup.apply(model, recovered.plan)
    proof = recoup.verify(model, recovered.plan, smaller, data.first)
    return recovered.plan, smaller, proof


@methods
@pytest.mark.parametrize("network", ["plain", "residual"])
@pytest.mark.parametrize("goal", ["budget", "tolerance"])
def test_step_by_step_gives_the_same_plan_as_prune(method, network, goal):
    model, images = network_and_images(network)
    batches = list(images.split(64))
    asked = (
        {"budget": Budget(macs=0.6)} if goal == "budget" else {"tolerance": 30.0, "validation": labelled(model, images)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.RecoupWarning)
        result = recoup.prune(model, batches, method=method, **asked)
        plan, smaller, proof = step_by_step(model, batches, Goal(**asked), find_method(method))
    assert plan.keep.keys() == result.plan.keep.keys() and plan.weights.keys() == result.plan.weights.keys()
    assert all(torch.equal(mask, result.plan.keep[name]) for name, mask in plan.keep.items())
    assert all(torch.equal(value, result.plan.weights[name]) for name, value in plan.weights.items())
    with torch.no_grad():
        assert torch.equal(smaller(images), result.model(images))
    assert proof.difference == result.report.proof.difference


@methods
def test_a_mask_of_ones_own_is_recovered(method):
    model, images = network_and_images("residual")
    method = find_method(method)
    data = recoup.split(model, [images], held_out=method.holds_out)
    seen = recoup.calibrate(recoup.trace(model, images), data, method)
    keep = {"a.0.0": torch.arange(14) % 2 == 0}
    plan = recoup.recover(seen, keep).plan
    assert torch.equal(plan.keep["a.0.0"], keep["a.0.0"]) and plan.keep["stem.0"].all()
    smaller = recoup.apply(model, plan)
    assert smaller.a[0][0].out_channels == 7
    recoup.verify(model, plan, smaller, seen.traced.inputs)


def widths(result):
    return {row.name: (row.before, row.after) for row in result.report.groups}


def pruned(method="fast", network="residual", **options):
    model, images = network_and_images(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.RecoupWarning)
        return recoup.prune(model, list(images.split(64)), method=method, **options)


@pytest.mark.parametrize(
    ("method", "patterns"),
    [
        *((method, ["a.0.0", "b.0.0"]) for method in METHODS),
        ("paper", ["a.0", "b.0.*"]),
        ("paper", ["?.0.0"]),
        ("paper", ["[ab].0*"]),
    ],
)
def test_only_what_is_named_is_pruned(method, patterns):
    found = widths(pruned(method, only=patterns, budget=Budget(macs=0.8)))
    assert all(after == before for name, (before, after) in found.items() if name not in ("a.0.0", "b.0.0"))
    assert any(after < before for before, after in found.values())


@methods
def test_what_is_excluded_stays(method):
    found = widths(pruned(method, exclude=["stem", "b"], budget=Budget(macs=0.8)))
    assert all(found[name][0] == found[name][1] for name in found if name.startswith(("stem", "b")))
    assert found["a.0.0"][1] < found["a.0.0"][0]


def test_what_is_left_alone_is_told_as_locked():
    model, images = network_and_images("residual")
    inspection = recoup.inspect(model, images, exclude=["a"])
    (row,) = [group.row for group in inspection.groups if group.row.name == "a.0.0"]
    assert row.locked == row.before and "left alone by request" in row.reasons


@methods
@pytest.mark.parametrize("given", [{"only": ["nowhere"]}, {"exclude": ["lay*"]}, {"widths": {"nowhere": 3}}])
def test_names_that_match_nothing_are_refused_with_those_that_exist(method, given):
    told = []
    with pytest.raises(UsageError, match=r"unknown group or module in \w+ '.*'; there are .*a.0.0.*b.0.0"):
        pruned(method, budget=Budget(macs=0.8), progress=lambda *step: told.append(step), **given)
    assert not told


def test_a_text_in_the_place_of_a_list_is_refused():
    with pytest.raises(UsageError, match=r"only must be a list of names, got the text 'a'. Write \['a'\]"):
        pruned(only="a", budget=Budget(macs=0.8))


def test_nothing_left_to_prune_is_refused():
    with pytest.raises(LockedError, match="left alone by request"):
        pruned(exclude=["*"], budget=Budget(macs=0.8))


@methods
def test_widths_by_hand_alone_leave_the_rest_whole(method):
    found = widths(pruned(method, widths={"a.0.0": 5}))
    assert found["a.0.0"] == (14, 5)
    assert all(before == after for name, (before, after) in found.items() if name != "a.0.0")


@methods
@pytest.mark.parametrize("goal", ["budget", "tolerance"])
def test_widths_by_hand_hold_whatever_else_is_asked_for(method, goal):
    model, images = network_and_images("residual")
    asked = (
        {"budget": Budget(macs=0.5)} if goal == "budget" else {"tolerance": 60.0, "validation": labelled(model, images)}
    )
    result = pruned(method, widths={"a.0.0": 11, "b.0.0": 3}, **asked)
    assert widths(result)["a.0.0"] == (14, 11) and widths(result)["b.0.0"] == (12, 3)
    if goal == "budget":
        assert result.report.after.macs <= 0.5 * result.report.before.macs


@pytest.mark.parametrize(("width", "told"), [(15, "it has 14"), (40, "cannot have 40 channels")])
def test_a_width_that_a_group_cannot_have_is_refused(width, told):
    with pytest.raises(UsageError, match=told):
        pruned(widths={"a.0.0": width})


def test_a_width_for_a_locked_group_says_why_it_is_locked():
    with pytest.raises(UsageError, match="head cannot have 3 channels: it has 6, of which 6 are locked: the"):
        pruned(widths={"head": 3})


@methods
def test_no_group_becomes_narrower_than_the_least_width(method):
    found = widths(pruned(method, min_width=9, budget=Budget(macs=0.8)))
    assert all(after >= min(9, before) for before, after in found.values())
    assert any(after < before for before, after in found.values())
    with pytest.raises(BudgetError, match="is out of reach"):
        pruned(method, min_width=9, budget=Budget(macs=0.1))


class ByNorm:
    """A method of a user's own: what `recoup.methods` asks of one, and nothing else."""

    selector, weighting, ridge, positions, multiple_of, seed = "l2", "none", 1e-6, None, 1, 0
    confidence, holds_out = None, False

    def allocate(self, calibration, rankings, goal, acceptance, progress):
        keep = calibration.structure.keep_all()
        for group in calibration.structure.prunable:
            keep[rankings[group.name].order[group.width // 2 :] + group.start] = False
        return recoup.Allocation(calibration.structure.refill(keep, torch.arange(len(keep))))

    def recover(self, calibration, allocation, progress):
        from recoup.recovery.one_pass import recover_in_one_pass

        return recoup.Recovered(recover_in_one_pass(calibration, allocation.keep), {})


def test_a_method_of_ones_own_is_taken():
    model, images = network_and_images("plain")
    result = recoup.prune(model, [images], budget=Budget(width=0.5), method=ByNorm())
    assert widths(result)["0.0"] == (12, 6)
    assert result.report.method["name"] == "ByNorm"


def test_an_nn_module_comes_out():
    assert isinstance(pruned(budget=Budget(macs=0.8)).model, nn.Module)


def test_batches_that_are_not_kept_are_read_once():
    model, images = network_and_images("plain")
    traced, data = recoup.trace(model, images), recoup.split(model, list(images.split(50)), held_out=False)
    assert recoup.calibrate(traced, data, recoup.Paper()).samples == 300
    with pytest.raises(CalibrationError, match="were read before.* Make a new split"):
        recoup.calibrate(traced, data, recoup.Paper())


def test_a_method_that_judges_needs_held_out_images():
    model, images = network_and_images("plain")
    data = recoup.split(model, [images], held_out=False)
    seen = recoup.calibrate(recoup.trace(model, images), data, recoup.Fast())
    with pytest.raises(UsageError, match="Fast judges by held-out images, and none were held out"):
        recoup.allocate(seen, recoup.rank(seen), Goal(budget=Budget(macs=0.5)))


def test_what_was_not_measured_is_not_a_number():
    model, images = network_and_images("plain")
    data = recoup.split(model, [images], held_out=False)
    seen = recoup.calibrate(recoup.trace(model, images), data, recoup.Paper())
    assert math.isnan(recoup.recover(seen, seen.structure.keep_all()).error)


def test_the_steps_take_methods_as_values():
    model, images = network_and_images("plain")
    with pytest.raises(UsageError, match="method must be a value here, such as recoup.Best"):
        recoup.calibrate(recoup.trace(model, images), recoup.split(model, [images]), "best")


def test_a_tolerance_that_so_few_images_cannot_vouch_for_is_refused_step_by_step_too():
    model, images = network_and_images("plain")
    seen = recoup.calibrate(recoup.trace(model, images), recoup.split(model, [images]), recoup.Fast())
    with pytest.raises(CalibrationError, match="60 images cannot tell with 95% confidence"):
        recoup.allocate(seen, recoup.rank(seen), Goal(tolerance=1.0))


def test_a_selector_with_a_loss_of_another_length_is_refused():
    def short(problem):
        return recoup.Ranking(torch.arange(problem.width), torch.zeros(3))

    with pytest.raises(UsageError, match=r"the loss of a ranking is told for 0 to \d+ channels"):
        pruned(recoup.Fast(selector=short), budget=Budget(macs=0.8))
