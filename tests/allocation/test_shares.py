import math
from types import SimpleNamespace

import pytest
import torch

from recoup.allocation import tolerance as loop
from recoup.allocation.goal import Search
from recoup.allocation.shares import (
    BOLDNESS,
    CANDIDATES,
    CLOSE,
    FULL,
    FULL_CANDIDATES,
    NEAR,
    PROMISING,
    QUICK,
    ROUGH,
    USUAL_POWER,
    Loss,
    full_shares,
    meeting,
    nearest,
    power_of,
    quick_shares,
)
from recoup.judge.acceptance import Verdict
from recoup.recovery.choose import Recovered
from tests.allocation.test_measured import allocation_of


class KnownAcceptance:
    """What is lost is a known function of the share that the mask costs; full candidates have one of their own."""

    base, what = 90.0, "score"

    def __init__(self, allocation, bound, better=None):
        self.allocation, self.bound, self.better = allocation, bound, better
        self.asked, self.asked_in_full = [], []

    def __call__(self, candidate, /):
        share = self.allocation.share(candidate.keep)
        (self.asked_in_full if candidate.in_full else self.asked).append(share)
        bound = (self.better if candidate.in_full else self.bound)(share)
        return Verdict(self.base - bound, bound, bound)


@pytest.fixture(autouse=True)
def _proposals_are_candidates(monkeypatch):
    """No network is made: what is measured is the proposal itself."""
    monkeypatch.setattr(loop, "apply", lambda _, plan: plan)


def searched_with(strategy, allocation, acceptance, tolerance):
    start = Search(allocation.widths.start(), acceptance, tolerance)
    return loop.search_within(SimpleNamespace(model=None), strategy, lambda proposal: Recovered(proposal, {}), start)


def quickly_searched(allocation, bound, tolerance):
    acceptance = KnownAcceptance(allocation, bound)
    return searched_with(quick_shares(allocation, tolerance), allocation, acceptance, tolerance), acceptance


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
    found, acceptance = quickly_searched(allocation, bound, tolerance)
    share = allocation.share(found.keep)
    assert bound(share) < tolerance
    shares = [allocation.least + n * (1 - allocation.least) / 1000 for n in range(1001)]
    smallest = min(share for share in shares if bound(share) < tolerance)
    assert share < smallest + near
    assert len(acceptance.asked) <= CANDIDATES


def test_where_every_share_passes_the_search_ends_near_the_least():
    allocation = allocation_of("plain", width=24)
    found, _ = quickly_searched(allocation, BOUNDS["always"], 1.0)
    assert allocation.share(found.keep) < allocation.least + 2 * NEAR
    assert all(trial.accepted for trial in found.trials)


def test_the_next_share_lies_where_the_root_of_the_bound_would_meet_the_level():
    """(1 - share)² · 16 is 4 at a half, given it at 1 and at 0.25."""
    assert meeting(Loss(1.0, 0.0), Loss(0.25, 9.0), 4.0) == pytest.approx(0.5)
    assert meeting(Loss(0.8, 1.0), Loss(0.4, 4.0), 2.25) == pytest.approx(0.6)


def test_the_next_share_is_not_too_close_to_one_that_is_known():
    assert meeting(Loss(1.0, 0.0), Loss(0.0, 1e6), 1.0) == pytest.approx(0.85)
    assert meeting(Loss(1.0, 0.0), Loss(0.0, 1.0), 0.999) == pytest.approx(0.15)
    assert meeting(Loss(1.0, -1.0), Loss(0.0, 1.0), 0.25) == pytest.approx(0.5)


def test_while_nothing_has_failed_the_next_share_is_in_the_middle():
    assert meeting(Loss(0.8, 0.1), Loss(0.2, math.inf), 1.0) == pytest.approx(0.5)


def test_a_power_carries_a_bound_to_any_level():
    """0.5 removed for 2, so 0.25 for an eighth of it, with the third power."""
    assert Loss(0.5, 2.0).along(3.0, 0.25) == pytest.approx(0.75)
    assert Loss(0.5, 2.0).along(3.0, 2.0) == pytest.approx(0.5)
    assert Loss(0.8, 1.0).along(4.0, 16.0) == pytest.approx(0.6)


@pytest.mark.parametrize("bound", [-1.0, 0.0, 1e-9])
def test_a_candidate_that_lost_nothing_is_not_followed_any_far(bound):
    assert Loss(0.8, bound).along(4.0, 1.0) == pytest.approx(0.6)


def test_the_power_is_that_of_the_two_losses_nearest_to_the_level():
    def losses(power, *removed):
        return [Loss(1 - part, 4 * part**power) for part in removed]

    assert power_of(losses(3, 0.2, 0.6), 1.0) == pytest.approx(3.0)
    assert power_of([*losses(5, 0.5, 0.8), Loss(0.95, 1e-3)], 1.0) == pytest.approx(5.0)
    assert power_of([Loss(0.95, 1e-3), *losses(5, 0.5, 0.8)], 1.0) == pytest.approx(5.0)


@pytest.mark.parametrize(("bounds", "power"), [((1.0, 1.1), 1.0), ((1.0, 0.9), 1.0), ((0.1, 9.0), 6.0)])
def test_a_power_that_noise_has_made_is_not_believed(bounds, power):
    assert power_of([Loss(0.6, bounds[0]), Loss(0.5, bounds[1])], 1.0) == power


@pytest.mark.parametrize("losses", [(), (Loss(0.5, 1.0),), (Loss(0.5, -1.0), Loss(0.4, 2.0)), (Loss(0.5, 1.0),) * 2])
def test_where_two_losses_do_not_tell_the_power_it_is_the_usual_one(losses):
    assert power_of(losses, 1.0) == USUAL_POWER
    assert power_of(losses, 1.0, 2.5) == 2.5


def searched(bound, better, tolerance=1.5, width=24, multiple_of=1):
    """Quick candidates that lose `bound` and full ones that lose `better`, and what was asked of both."""
    allocation = allocation_of("plain", width=width, multiple_of=multiple_of)
    acceptance = KnownAcceptance(allocation, bound, better)
    found = searched_with(full_shares(allocation, tolerance), allocation, acceptance, tolerance)
    is_full = found.recovered is not None and found.recovered.plan.in_full
    assert_sound(allocation, found, is_full)
    return allocation, found, is_full, {"quick": acceptance.asked, "full": acceptance.asked_in_full}


def assert_sound(allocation, found, is_full):
    """The answer is the smallest that passed, and what it loses; no mask is tried twice in full."""
    accepted = [trial for trial in found.trials if trial.accepted]
    share = allocation.share(found.keep)
    assert share == pytest.approx(min((trial.share for trial in accepted), default=1.0))
    at = [trial for trial in accepted if trial.share == pytest.approx(share)]
    assert is_full == any(trial.groups == FULL for trial in at)
    full = [trial.share for trial in full_trials(found)]
    assert len(set(full)) == len(full) <= FULL_CANDIDATES


def full_trials(found):
    return [trial for trial in found.trials if trial.groups == FULL]


def growing(power, factor):
    return lambda share: factor * (1 - share) ** power


@pytest.mark.parametrize("power", [2, 3, 5])
@pytest.mark.parametrize("gain", [1.0, 1.5, 2.2, 3.0, 6.0])
def test_full_candidates_use_most_of_the_tolerance_and_no_more(power, gain):
    bound, better = growing(power, 12.0), growing(power, 12.0 / gain)
    allocation, found, is_full, asked = searched(bound, better)
    share = allocation.share(found.keep)
    assert 0.4 * 1.5 < better(share) < 1.5
    assert found.drop == pytest.approx(better(share))
    assert is_full
    assert 1 <= len(asked["full"]) <= 2
    full = full_trials(found)
    assert [trial.share for trial in full] == [pytest.approx(share) for share in asked["full"]]
    assert [trial.drop for trial in full] == [pytest.approx(better(share)) for share in asked["full"]]
    assert len(found.trials) == len(asked["quick"]) + len(full)
    assert all(trial.allowed == 1.5 for trial in found.trials)


@pytest.mark.parametrize("power", [2, 4])
def test_full_candidates_that_are_as_much_better_as_most_need_one(power):
    _, found, _, asked = searched(growing(power, 12.0), growing(power, 12.0 / 2.2))
    assert len(asked["full"]) == 1
    assert found.trials[-1].accepted


def test_one_that_is_far_better_than_expected_is_followed_by_another():
    allocation, found, _, asked = searched(growing(2, 12.0), growing(2, 2.4))
    first, second = asked["full"]
    assert second < first * (1 - PROMISING)
    assert allocation.share(found.keep) == pytest.approx(second)


def test_after_one_that_passed_and_one_that_failed_there_is_no_third():
    allocation, found, is_full, asked = searched(growing(2, 12.0), lambda share: 0.3 if share > 0.45 else 1.8)
    first, second = asked["full"]
    assert second < 0.45 < first
    assert allocation.share(found.keep) == pytest.approx(first)
    assert is_full


def test_quick_candidates_end_close_to_the_bold_level():
    """12 (1 - share)^2 is 2.55 at 0.54: the middle of all there is will do."""
    _, found, _, asked = searched(growing(2, 12.0), growing(2, 5.0))
    last = [trial for trial in found.trials if trial.groups == QUICK][-1]
    assert abs(last.drop - BOLDNESS * 1.5) < CLOSE * BOLDNESS * 1.5
    assert len(asked["quick"]) <= 3


def test_where_no_full_candidate_passes_the_best_quick_one_stays():
    allocation, found, is_full, asked = searched(growing(2, 4.0), BOUNDS["never"])
    assert len(asked["full"]) == 2  # where to begin, and where the quick one passed: there are none in between
    assert not is_full
    smallest = min(trial.share for trial in found.trials if trial.accepted)
    assert torch.equal(found.keep, allocation.keep(smallest))


def test_where_no_full_candidate_and_no_quick_one_has_passed_yet_one_is_looked_for():
    allocation, found, is_full, asked = searched(growing(2, 12.0), BOUNDS["never"])
    assert not any(trial.accepted for trial in found.trials[: found.trials.index(full_trials(found)[-1])])
    assert not is_full
    assert 0.5 * 1.5 < growing(2, 12.0)(allocation.share(found.keep)) < 1.5
    assert len(set(found.trials)) == len(asked["quick"]) + len(asked["full"])  # none is measured twice


@pytest.mark.parametrize("power", [1, 2])
def test_full_candidates_that_lose_far_more_than_expected_find_their_way_back(power):
    """Linear growth is what a measure has that counts channels."""
    allocation, found, is_full, asked = searched(growing(power, 12.0), growing(power, 20.0), width=64)
    assert is_full
    assert len(asked["full"]) <= FULL_CANDIDATES
    assert 0.4 * 1.5 < growing(power, 20.0)(allocation.share(found.keep)) < 1.5


def test_full_candidates_after_one_that_failed_are_no_larger_than_a_quick_one_that_passed():
    """The first quick one passes with half the cost; full ones are no better than that, and noise says worse."""
    _, found, is_full, asked = searched(growing(2, 4.0), lambda share: 1.0 if share > 0.48 else 40.0)
    passed = min(trial.share for trial in found.trials if trial.accepted and trial.groups == QUICK)
    assert is_full
    assert all(share <= passed + 1e-9 for share in asked["full"])


def test_where_nothing_passes_everything_stays():
    _, found, is_full, _ = searched(BOUNDS["never"], BOUNDS["never"])
    assert bool(found.keep.all())
    assert found.drop == 0.0
    assert not is_full


def test_where_everything_passes_the_full_ones_go_to_the_least():
    allocation, found, is_full, _ = searched(BOUNDS["always"], BOUNDS["always"])
    assert allocation.share(found.keep) < allocation.least + 0.05
    assert is_full


@pytest.mark.parametrize("multiple_of", [4, 8])
@pytest.mark.parametrize("power", [1, 4])
@pytest.mark.parametrize("gain", [0.7, 2.2])
@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_where_masks_are_few_none_is_tried_twice_and_the_smallest_that_passed_is_kept(multiple_of, power, gain, factor):
    """All of it is asserted by `searched`. Widths are rounded up: a mask may cost more than was asked for."""
    allocation, found, _, _ = searched(growing(power, factor), growing(power, factor / gain), multiple_of=multiple_of)
    if any(growing(power, factor)(allocation.share(allocation.keep(share))) < 1.5 for share in (0.3, 0.5, 0.7, 0.9)):
        assert not bool(found.keep.all())


def test_going_back_finds_the_next_mask_where_masks_are_few():
    """There are masks of 0.32, 0.33 and 0.63 of the cost: after the first has failed a step of 0.02 is none."""
    allocation, found, is_full, _ = searched(growing(2, 12.0), growing(2, 5.45), multiple_of=8)
    assert is_full
    assert growing(2, 5.45)(allocation.share(found.keep)) > 0.3 * 1.5


def test_quick_candidates_end_where_the_share_is_roughly_known():
    """A step: no loss is ever close to the bold level."""
    _, found, _, _ = searched(BOUNDS["step"], BOUNDS["step"])
    quick = [trial for trial in found.trials if trial.groups == QUICK]
    below = min(trial.share for trial in quick if trial.drop == 0.0)
    above = max(trial.share for trial in quick if trial.drop == 50.0)
    assert below - above < 1.5 * ROUGH
    assert len(quick) < CANDIDATES


def test_the_full_one_begins_at_the_quick_one_nearest_to_the_bold_level():
    """Noise: the last quick one, far below the level, is not where to begin."""
    losses = [Loss(0.8, 0.3), Loss(0.5, 2.4), Loss(0.6, 0.5)]
    assert nearest(losses, 2.55) is losses[1]
    assert nearest([Loss(0.5, 20.0), Loss(0.4, 2.0)], 2.55).share == 0.4
    assert nearest([Loss(0.9, -0.1), Loss(0.5, 5.0)], 1.0).share == 0.5


@pytest.mark.parametrize("shares", [quick_shares, full_shares])
def test_a_strategy_says_what_its_candidates_cost_and_what_is_allowed(shares):
    allocation = allocation_of("plain", width=24)
    strategy, proposals = shares(allocation, 1.5), []
    proposal = next(strategy)
    while proposal is not None:
        proposals.append(proposal)
        bound = growing(2, 12.0)(proposal.share)
        try:
            proposal = strategy.send(Verdict(90.0 - bound, bound, bound))
        except StopIteration as end:
            proposal, losses = None, end.value
    for proposal in proposals:
        assert proposal.share == proposal.size == allocation.share(proposal.keep)
        assert proposal.allowed == 1.5
        assert proposal.groups == (FULL if proposal.in_full else QUICK)
    asked = [proposal for proposal in proposals if proposal.in_full == (shares is full_shares)]
    assert losses == [Loss(proposal.share, growing(2, 12.0)(proposal.share)) for proposal in asked]
    assert any(proposal.in_full for proposal in proposals) is (shares is full_shares)


def test_progress_is_told_of_every_quick_candidate():
    allocation, told = allocation_of("plain", width=24), []
    acceptance = KnownAcceptance(allocation, BOUNDS["quadratic"])
    strategy = quick_shares(allocation, 1.0, lambda *step: told.append(step))
    searched_with(strategy, allocation, acceptance, 1.0)
    assert told == [("search", number + 1, CANDIDATES) for number in range(len(acceptance.asked))]
