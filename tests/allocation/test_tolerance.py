"""The loop on a real network, with strategies whose proposals are known and with the one of `allocation.shares`."""

import pytest
import torch

from recoup.allocation.goal import Proposal, Search
from recoup.allocation.shares import quick_shares
from recoup.allocation.tolerance import search_within
from recoup.errors import CalibrationError, VerificationError
from recoup.judge.acceptance import Verdict
from recoup.recovery.choose import Recovered
from recoup.recovery.one_pass import recover_in_one_pass
from tests.allocation.test_measured import allocation_of, prepared

BOUNDS = {
    "quadratic": lambda share: 10 * (1 - share) ** 2,
    "never": lambda share: 50.0,
}


class KnownAcceptance:
    """What is lost is a known function of the share that a network costs, which its layers tell."""

    base, what = 90.0, "score"

    def __init__(self, allocation, bound, slack=0.0):
        self.allocation, self.bound, self.slack, self.asked = allocation, bound, slack, []

    def __call__(self, candidate, /):
        layers = {"0.0.0": candidate[0][0][0], "0.2.0": candidate[0][2][0]}
        counts = {name: layer.out_channels for name, layer in layers.items()}
        share = self.allocation.costs.total(counts) / self.allocation.whole
        self.asked.append(share)
        bound = self.bound(share)
        return Verdict(self.base - bound + self.slack, bound - self.slack, bound)


def searched(strategy, bound, tolerance=1.0, slack=0.0):
    """The search on the plain network, what measured for it, and every recovery by the proposal it is of."""
    _, seen, _ = prepared("plain", 24)
    allocation, recoveries = allocation_of("plain", width=24), []
    acceptance = KnownAcceptance(allocation, bound, slack)

    def recover(proposal):
        recoveries.append(Recovered(recover_in_one_pass(seen, proposal.keep), {}))
        return recoveries[-1]

    found = search_within(seen, strategy, recover, Search(allocation.widths.start(), acceptance, tolerance))
    return found, acceptance, recoveries


def quickly_searched(bound, tolerance, slack=0.0):
    return searched(quick_shares(allocation_of("plain", width=24), tolerance), bound, tolerance, slack)


def test_every_trial_is_recorded_and_the_last_that_passed_is_kept():
    allocation = allocation_of("plain", width=24)
    found, acceptance, _ = quickly_searched(BOUNDS["quadratic"], 2.0, slack=0.25)
    assert [trial.drop for trial in found.trials] == [
        pytest.approx(BOUNDS["quadratic"](share)) for share in acceptance.asked
    ]
    assert all(trial.groups == ("all groups",) and trial.allowed == 2.0 for trial in found.trials)
    assert {trial.accepted for trial in found.trials} == {True, False}
    smallest = min(trial.share for trial in found.trials if trial.accepted)
    assert torch.equal(found.keep, allocation.keep(smallest))
    assert found.acceptance.base == 90.0
    assert found.drop == pytest.approx(BOUNDS["quadratic"](allocation.share(found.keep)) - 0.25)


def test_where_no_share_passes_everything_stays():
    found, _, _ = quickly_searched(BOUNDS["never"], 1.0)
    assert bool(found.keep.all())
    assert found.drop == 0.0
    assert not any(trial.accepted for trial in found.trials)
    assert found.recovered is None


def test_a_bound_equal_to_the_tolerance_is_too_much():
    found, _, _ = quickly_searched(lambda share: 1.0, 1.0)
    assert bool(found.keep.all())


def proposals(*shares, allowed=1.0):
    """A strategy that asks for these shares whatever is measured, and the verdicts it was sent."""
    allocation, sent = allocation_of("plain", width=24), []

    def strategy():
        for share in shares:
            keep = allocation.keep(share)
            cost = allocation.share(keep)
            sent.append((yield Proposal(keep, ("some",), cost, allowed, cost)))

    return strategy(), sent


@pytest.mark.parametrize("shares", [(0.9, 0.7, 0.8), (0.7, 0.9, 0.8), (0.8, 0.9, 0.7), (0.5, 0.7, 0.4)])
def test_the_answer_is_the_smallest_that_passed_in_whatever_order_they_come(shares):
    """Those with less than 0.65 of the cost fail."""
    strategy, sent = proposals(*shares)
    found, _, recoveries = searched(strategy, lambda share: 0.0 if share > 0.65 else 2.0)
    assert allocation_of("plain", width=24).share(found.keep) == pytest.approx(found.size)
    assert torch.equal(found.keep, allocation_of("plain", width=24).keep(min(s for s in shares if s > 0.65)))
    passed = [recovered for recovered, verdict in zip(recoveries, sent, strict=True) if verdict.bound < 1.0]
    assert found.recovered in passed
    assert torch.equal(torch.cat(list(found.recovered.plan.keep.values())), found.keep)


def test_of_two_of_the_same_size_the_later_is_the_answer():
    masks = [allocation_of("plain", width=24).keep(share) for share in (0.8, 0.7)]

    def strategy():
        for keep in (*masks, masks[0]):
            yield Proposal(keep, ("some",), 0.8, 1.0, 0.8)

    found, acceptance, (_, second) = searched(strategy(), lambda share: 0.5)
    assert found.recovered is second and torch.equal(found.keep, masks[1])
    assert len(acceptance.asked) == 2 and len(found.trials) == 3  # the third is the first again


def test_a_strategy_is_sent_what_was_measured_of_its_own_proposals():
    strategy, sent = proposals(0.9, 0.5, 0.7)
    found, acceptance, _ = searched(strategy, BOUNDS["quadratic"])
    assert [verdict.bound for verdict in sent] == [pytest.approx(BOUNDS["quadratic"](s)) for s in acceptance.asked]
    assert [trial.drop for trial in found.trials] == [verdict.bound for verdict in sent]
    assert [trial.share for trial in found.trials] == [pytest.approx(share) for share in acceptance.asked]


def test_what_is_allowed_is_the_proposals_own():
    """A step constraint allows less than the tolerance."""
    strategy, _ = proposals(0.8, allowed=0.25)
    found, _, _ = searched(strategy, lambda share: 0.5)
    assert bool(found.keep.all())
    assert [trial.accepted for trial in found.trials] == [False]


def test_a_strategy_without_proposals_leaves_the_start():
    strategy, _ = proposals()
    found, acceptance, recoveries = searched(strategy, BOUNDS["never"])
    assert bool(found.keep.all())
    assert (found.trials, found.recovered, acceptance.asked, recoveries) == ((), None, [], [])


def test_a_candidate_that_cannot_be_measured_says_so():
    def fails(share):
        raise RuntimeError("shapes (3, 4) and (5, 6)")

    with pytest.raises(VerificationError, match=r"could not be measured \(shapes \(3, 4\) and \(5, 6\)\)"):
        searched(proposals(0.8)[0], fails)


def test_what_a_user_can_mend_is_passed_on_as_it_is():
    def fails(share):
        raise CalibrationError("no labels")

    with pytest.raises(CalibrationError, match="no labels"):
        searched(proposals(0.8)[0], fails)
