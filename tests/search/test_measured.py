import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import recoup
from recoup.batches import Inputs
from recoup.errors import BudgetError, UsageError
from recoup.judging.harm import Reference
from recoup.judging.judge import Verdict
from recoup.recover import Compensator
from recoup.search.allocation import harm_of
from recoup.search.binary import Trial
from recoup.search.measured import (
    CANDIDATES,
    NEAR,
    Allocator,
    Point,
    allocator,
    bolder_share,
    keep_within,
    meeting,
    search_share,
)
from recoup.settings import PRESETS, Budget
from recoup.structure.cost import cost
from tests.zoo import ZOO

NAMES = pytest.mark.parametrize(
    "name", ["plain", "flattened", "residual", "depthwise", "concat", "shared", "gates", "perceptron", "scaled"]
)


@functools.cache
def prepared(name, width=12, **settings):
    entry = ZOO[name]
    model = entry.build(width)
    seen = recoup.calibrate(model, recoup.trace(model, entry.batch(2)), [entry.batch(60)], PRESETS["fast"])
    batch = entry.batch(40, seed=2)
    reference = Reference(seen.traced.standalone.host, [Inputs(batch if isinstance(batch, tuple) else (batch,), {})])
    return model, replace(seen, settings=replace(seen.settings, **settings)), reference


@functools.cache
def allocation_of(name, of="macs", width=12, **settings):
    model, seen, reference = prepared(name, width, **settings)
    return allocator(model, seen, recoup.select(seen), reference, of)


@NAMES
@pytest.mark.parametrize("of", ["macs", "parameters"])
def test_a_budget_is_met_and_not_by_much(name, of):
    model, seen, _ = prepared(name)
    whole = getattr(cost(seen.structure, model), of)
    allocation = allocation_of(name, of)
    assert allocation.whole == whole
    for share in (0.8, 0.5):
        keep = keep_within(allocation, Budget(**{of: share}))
        kept = getattr(cost(seen.structure, model, keep), of)
        assert 0.75 * share * whole < kept <= share * whole
        assert allocation.share(keep) == pytest.approx(kept / whole)


@NAMES
def test_all_of_the_budget_keeps_everything(name):
    assert bool(allocation_of(name).keep(1.0).all())


@NAMES
def test_the_least_share_is_one_channel_per_group(name):
    allocation = allocation_of(name)
    keep = keep_within(allocation, Budget(macs=allocation.least + 1e-9))
    structure = allocation.widths.structure
    assert all(int(keep[group.channels].sum()) == max(1, group.width - group.free) for group in structure.prunable)


def test_kept_are_the_best_channels_of_every_group():
    allocation = allocation_of("residual")
    keep = allocation.keep(0.5)
    for group in allocation.widths.structure.prunable:
        order = allocation.widths.order(group)
        count = int(keep[group.channels].sum())
        assert set(order[:count].tolist()) == set((keep[group.channels].nonzero().squeeze(1) + group.start).tolist())


def test_a_smaller_share_keeps_no_group_wider_in_a_chain():
    counts = [int(allocation_of("plain").keep(share).sum()) for share in (0.9, 0.7, 0.5, 0.3)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 2


def test_the_harm_of_a_group_is_measured_with_that_group_alone_cut():
    _, seen, reference = prepared("residual")
    rankings, allocation = recoup.select(seen), allocation_of("residual")
    for group in seen.structure.prunable:
        harm, measured = allocation.harms[group.name], {}
        for count in {round(0.75 * group.width), round(0.25 * group.width)}:
            keep = seen.structure.keep_all()
            keep[group.channels] = False
            keep[rankings[group.name].order[:count] + group.start] = True
            measured[count] = reference.harm(Compensator(seen).weights(keep))
            assert float(harm.curve[count]) == pytest.approx(measured[count], rel=1e-9)
        assert float(harm.curve[-1]) == pytest.approx(0.0, abs=1e-9)
        torch.testing.assert_close(harm.curve, harm_of(rankings[group.name].loss, measured, 1).curve)
        assert harm.least == 1


def test_widths_are_multiples_and_the_budget_is_still_met():
    model, seen, _ = prepared("residual", 16, multiple_of=4)
    allocation = allocation_of("residual", "macs", 16, multiple_of=4)
    whole = cost(seen.structure, model)
    for share in (0.7, 0.4):
        keep = keep_within(allocation, Budget(macs=share))
        for group in seen.structure.prunable:
            count = int(keep[group.channels].sum())
            assert count % 4 == 0 or count == group.width
        assert cost(seen.structure, model, keep).macs <= share * whole.macs


def test_dead_channels_go_whatever_the_share():
    entry = ZOO["plain"]
    model = entry.build(8)
    model[0][0][1].bias.data[2] = -100.0  # never passes the activation
    seen = recoup.calibrate(model, recoup.trace(model, entry.batch(2)), [entry.batch(60)], PRESETS["fast"])
    reference = Reference(seen.traced.standalone.host, [Inputs((entry.batch(40, seed=2),), {})])
    keep = allocator(model, seen, recoup.select(seen), reference).keep(1.0)
    assert keep.nonzero().squeeze(1).tolist() == [n for n in range(len(keep)) if n != 2]


def test_a_budget_that_locked_channels_exceed_is_refused():
    allocation = allocation_of("unknown")
    assert allocation.least > 0.01
    with pytest.raises(
        BudgetError, match=rf"keeping 1.0% of the macs is out of reach: .* {allocation.least:.1%} remain"
    ):
        keep_within(allocation, Budget(macs=0.01))


@pytest.mark.parametrize("selector", ["l2", "random"])
def test_a_selector_that_knows_no_loss_is_refused(selector):
    model, seen, reference = prepared("plain")
    with pytest.raises(
        UsageError, match=r"0\.0\.0: measured allocation needs a selector that knows the loss .*backward"
    ):
        allocator(model, seen, recoup.select(seen, selector), reference)


def test_progress_is_told_of_every_group():
    model, seen, reference = prepared("plain")
    told = []
    allocator(model, seen, recoup.select(seen), reference, "macs", lambda *step: told.append(step))
    assert told == [("measure groups", 1, 2), ("measure groups", 2, 2)]


class KnownJudge:
    """What is lost is a known function of the share that the mask costs."""

    base = 90.0

    def __init__(self, allocation, bound, slack=0.0):
        self.allocation, self.bound, self.slack, self.asked = allocation, bound, slack, []

    def __call__(self, candidate, /):
        share = self.allocation.share(candidate.mask)
        self.asked.append(share)
        bound = self.bound(share)
        return Verdict(self.base - bound + self.slack, bound - self.slack, bound)


def masked(mask):
    candidate = nn.Identity()
    candidate.mask = mask
    return candidate


BOUNDS = {
    "quadratic": lambda share: 10 * (1 - share) ** 2,
    "linear": lambda share: 5 * (1 - share),
    "steep": lambda share: 3 * (1 / share - 1),
    "step": lambda share: 0.0 if share > 0.6 else 50.0,
    "never": lambda share: 50.0,
    "always": lambda share: 0.0,
}


@pytest.mark.parametrize(
    ("kind", "tolerance", "near"),
    [
        ("quadratic", 0.5, 0.06),
        ("quadratic", 1.5, 0.06),
        ("linear", 1.5, 0.06),
        ("steep", 1.5, 0.06),
        ("step", 1.5, 0.15),
    ],
)
def test_the_share_found_meets_the_tolerance_and_is_near_the_smallest_that_does(kind, tolerance, near):
    allocation, bound = allocation_of("plain", width=24), BOUNDS[kind]
    judge = KnownJudge(allocation, bound)
    found = search_share(allocation, masked, judge, tolerance)
    share = allocation.share(found.keep)
    assert bound(share) < tolerance
    shares = [allocation.least + n * (1 - allocation.least) / 1000 for n in range(1001)]
    smallest = min(share for share in shares if bound(share) < tolerance)
    assert share < smallest + near
    assert len(judge.asked) <= CANDIDATES


def test_every_trial_is_recorded_and_the_last_that_passed_is_kept():
    allocation = allocation_of("plain", width=24)
    judge = KnownJudge(allocation, BOUNDS["quadratic"], slack=0.25)
    found = search_share(allocation, masked, judge, 2.0)
    assert [trial.drop for trial in found.trials] == [
        pytest.approx(BOUNDS["quadratic"](share)) for share in judge.asked
    ]
    assert all(trial.groups == ("all groups",) and trial.allowed == 2.0 for trial in found.trials)
    assert {trial.accepted for trial in found.trials} == {True, False}
    smallest = min(trial.share for trial in found.trials if trial.accepted)
    assert torch.equal(found.keep, allocation.keep(smallest))
    assert found.base == 90.0
    assert found.drop == pytest.approx(BOUNDS["quadratic"](allocation.share(found.keep)) - 0.25)


def test_where_no_share_passes_everything_stays():
    allocation = allocation_of("plain", width=24)
    found = search_share(allocation, masked, KnownJudge(allocation, BOUNDS["never"]), 1.0)
    assert bool(found.keep.all())
    assert found.drop == 0.0
    assert not any(trial.accepted for trial in found.trials)


def test_where_every_share_passes_the_search_ends_near_the_least():
    allocation = allocation_of("plain", width=24)
    found = search_share(allocation, masked, KnownJudge(allocation, BOUNDS["always"]), 1.0)
    assert allocation.share(found.keep) < allocation.least + 2 * NEAR
    assert all(trial.accepted for trial in found.trials)


def test_a_bound_equal_to_the_tolerance_is_too_much():
    allocation = allocation_of("plain", width=24)
    found = search_share(allocation, masked, KnownJudge(allocation, lambda share: 1.0), 1.0)
    assert bool(found.keep.all())


def test_the_next_share_lies_where_the_root_of_the_bound_would_meet_the_level():
    """(1 - share)² · 16 is 4 at a half, given it at 1 and at 0.25."""
    assert meeting(Point(1.0, 0.0), Point(0.25, 9.0), 4.0) == pytest.approx(0.5)
    assert meeting(Point(0.8, 1.0), Point(0.4, 4.0), 2.25) == pytest.approx(0.6)


def test_the_next_share_is_not_too_close_to_one_that_is_known():
    assert meeting(Point(1.0, 0.0), Point(0.0, 1e6), 1.0) == pytest.approx(0.85)
    assert meeting(Point(1.0, 0.0), Point(0.0, 1.0), 0.999) == pytest.approx(0.15)
    assert meeting(Point(1.0, -1.0), Point(0.0, 1.0), 0.25) == pytest.approx(0.5)


def test_while_nothing_has_failed_the_next_share_is_in_the_middle():
    assert meeting(Point(0.8, 0.1), Point(0.2, math.inf), 1.0) == pytest.approx(0.5)


def trial(share, drop, allowed=1.0):
    return Trial(("all groups",), share, drop, allowed)


def test_a_bolder_share_lies_between_the_trials_around_its_level():
    trials = (trial(0.6, 4.0), trial(0.8, 1.0), trial(0.4, 9.0))
    assert bolder_share(trials, 2.25) == pytest.approx(0.7)
    assert bolder_share(trials, 6.25) == pytest.approx(0.5)
    assert bolder_share((trial(0.5, 4.0),), 1.0) == pytest.approx(0.75)  # from the whole network, which loses nothing


def test_without_a_trial_beyond_its_level_there_is_no_bolder_share():
    assert bolder_share((trial(0.6, 0.5), trial(0.4, 0.9)), 1.4) is None
    assert bolder_share((), 1.4) is None


def test_a_trial_that_failed_above_one_that_passed_is_not_beyond():
    """Noise: 0.7 lost more than 0.5."""
    trials = (trial(0.7, 3.0), trial(0.5, 0.5))
    assert bolder_share(trials, 1.0) is None
    assert bolder_share((*trials, trial(0.3, 4.5)), 2.0) == pytest.approx(
        0.5 - 0.2 * (2**0.5 - 0.5**0.5) / (4.5**0.5 - 0.5**0.5)
    )


def test_an_allocator_can_be_made_of_known_parts():
    """Two groups that cost the same, one of them worth everything."""
    whole = allocation_of("perceptron", width=12)
    (first, second) = whole.harms
    harms = {first: replace(whole.harms[first], curve=0 * whole.harms[first].curve), second: whole.harms[second]}
    keep = Allocator(whole.widths, harms, whole.terms).keep(0.7)
    structure = whole.widths.structure
    assert int(keep[structure.group(first).channels].sum()) < int(
        whole.keep(0.7)[structure.group(first).channels].sum()
    )
    assert whole.share(keep) <= 0.7
