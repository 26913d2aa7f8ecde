import math

import pytest
import torch
from torch import nn

from recoup.judging.judge import Verdict
from recoup.search.binary import Search, Trial
from recoup.search.tolerance import (
    AIM,
    CANDIDATES,
    FULL_CANDIDATES,
    NEAR,
    ROUGH,
    Point,
    bolder_share,
    further,
    meeting,
    press_on,
    search_share,
)
from tests.search.test_measured import allocation_of


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


def test_a_rough_search_ends_sooner():
    allocation = allocation_of("plain", width=24)
    judges = [KnownJudge(allocation, BOUNDS["step"]) for _ in range(2)]
    shares = [
        allocation.share(search_share(allocation, masked, judge, 1.5, near=near).keep)
        for judge, near in zip(judges, (NEAR, ROUGH), strict=True)
    ]
    assert len(judges[1].asked) < len(judges[0].asked)
    assert shares[1] < shares[0] + ROUGH


def pressed(bound, better, tolerance=1.5):
    """A rough search with candidates that lose `bound`, then full ones that lose `better`."""
    allocation = allocation_of("plain", width=24)
    found = search_share(allocation, masked, KnownJudge(allocation, bound), tolerance, near=ROUGH)
    judge = KnownJudge(allocation, better)
    return allocation, found, press_on(allocation, masked, judge, tolerance, found), judge


@pytest.mark.parametrize("gain", [1.5, 2.0, 4.0])
def test_better_candidates_go_further_and_stay_within_the_tolerance(gain):
    bound = BOUNDS["quadratic"]
    allocation, found, more, judge = pressed(bound, lambda share: bound(share) / gain)
    assert allocation.share(more.keep) < allocation.share(found.keep)
    assert bound(allocation.share(more.keep)) / gain < 1.5
    assert 1 <= len(judge.asked) <= FULL_CANDIDATES
    full = more.trials[len(found.trials) :]
    assert [trial.share for trial in full] == [pytest.approx(share) for share in judge.asked]
    assert all(trial.groups == ("all groups, in full",) for trial in full)
    assert more.drop == pytest.approx(bound(allocation.share(more.keep)) / gain)


def test_what_was_found_stays_where_no_better_candidate_passes():
    allocation, found, more, judge = pressed(BOUNDS["quadratic"], BOUNDS["never"])
    assert more.keep is found.keep and more.drop == found.drop
    assert len(more.trials) == len(found.trials) + len(judge.asked)
    assert judge.asked and all(share < allocation.share(found.keep) for share in judge.asked)


def test_where_nothing_was_found_nothing_is_tried():
    allocation = allocation_of("plain", width=24)
    found = Search(torch.ones(3, dtype=torch.bool), 90.0, 0.0, (trial(0.5, 3.0),))
    assert press_on(allocation, masked, KnownJudge(allocation, BOUNDS["always"]), 1.0, found) is found


def test_the_share_after_one_that_passed_aims_at_the_level_but_not_too_far():
    """The root of the bound grows evenly: 0.4 of the cost for 1, so 0.8 for 4."""
    assert further(Point(0.6, 1.0), None, 4.0) == pytest.approx(0.2)
    assert further(Point(0.6, 0.0), None, 4.0) == pytest.approx(0.2)
    assert further(Point(0.8, 1.0), Point(0.4, 4.0), 2.25) == meeting(Point(0.8, 1.0), Point(0.4, 4.0), 2.25)
    assert AIM < 1
