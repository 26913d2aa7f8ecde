import pytest
import torch

import recoup
from recoup.allocation import rounds
from recoup.allocation.rounds import keep_in_rounds, reconsidered
from recoup.config import Budget
from recoup.recovery.choose import IN_SEQUENCE, ONE_PASS, Recovered
from tests.allocation.test_measured import allocation_of
from tests.zoo import ZOO

NAME = "residual"


def world(allocation, truths, one_pass=10.0):
    """A network in which every group causes its expected output error times a factor of its own."""
    asked = []

    def recover(keep):
        asked.append(keep)
        found = sum(
            truths[name] * float(allocation.curves[name].errors[n]) for name, n in allocation.counts(keep).items()
        )
        return Recovered(None, {ONE_PASS: one_pass * found, IN_SEQUENCE: found})

    return recover, asked


def looked_at_again(allocation, keep, recover):
    return reconsidered(allocation, keep, recover(keep), recover)


def halved(allocation):
    """The mask that cuts every group to half of its channels."""
    structure = allocation.widths.structure
    keep = structure.keep_all()
    for group in structure.prunable:
        keep = allocation.widths.cut(group, group.width // 2, keep)
    return keep


def truths_of(allocation):
    return {name: 0.5 + number for number, name in enumerate(allocation.curves)}


def test_errors_become_what_they_are_in_the_pruned_network():
    allocation = allocation_of(NAME)
    truths = truths_of(allocation)
    recover, asked = world(allocation, truths)
    again = looked_at_again(allocation, halved(allocation), recover)
    assert len(asked) == 1 + len(truths)
    for name, curve in again.curves.items():
        torch.testing.assert_close(curve.errors, truths[name] * allocation.curves[name].errors)
        assert (curve.least, curve.most) == (allocation.curves[name].least, allocation.curves[name].most)


def test_neighbours_are_asked_together_where_there_are_many(monkeypatch):
    monkeypatch.setattr(rounds, "LOOKS", 2)
    allocation = allocation_of(NAME)
    recover, asked = world(allocation, dict.fromkeys(allocation.curves, 3.0))
    again = looked_at_again(allocation, halved(allocation), recover)
    assert len(allocation.curves) > 2 and len(asked) == 3
    for name, curve in again.curves.items():
        torch.testing.assert_close(curve.errors, 3 * allocation.curves[name].errors)


def test_a_group_that_is_whole_gets_the_mean_and_none_less_than_a_share_of_it():
    allocation = allocation_of(NAME)
    first, second, *_ = allocation.curves
    keep = halved(allocation)
    keep[allocation.widths.structure.group(first).channels] = True
    truths = {**dict.fromkeys(allocation.curves, 2.0), second: -1.0}
    again = looked_at_again(allocation, keep, world(allocation, truths)[0])
    mean = (2.0 * (len(truths) - 2) - 1.0) / (len(truths) - 1)
    torch.testing.assert_close(again.curves[first].errors, mean * allocation.curves[first].errors)
    torch.testing.assert_close(again.curves[second].errors, rounds.LEAST * mean * allocation.curves[second].errors)


def test_where_recovery_changes_little_one_round_will_do():
    allocation = allocation_of(NAME)
    recover, asked = world(allocation, truths_of(allocation), one_pass=1.2)
    assert looked_at_again(allocation, halved(allocation), recover) is allocation
    assert len(asked) == 1


def test_nothing_cut_is_nothing_to_ask():
    allocation = allocation_of(NAME)
    recover, _ = world(allocation, truths_of(allocation))
    assert looked_at_again(allocation, allocation.keep(1.0), recover) is allocation


def test_the_second_round_errs_less_in_the_same_budget():
    allocation = allocation_of(NAME)
    recover, asked = world(allocation, truths_of(allocation))
    first, second = (keep_in_rounds(allocation, lambda a: a.keep(0.4), recover, n) for n in (1, 2))
    assert recover(second).error < recover(first).error
    assert allocation.share(second) <= 0.4
    assert len({keep.numpy().tobytes() for keep in asked}) == len(asked) - 2  # the two of this test


def test_a_second_round_that_errs_more_is_not_kept():
    allocation = allocation_of(NAME)
    honest, _ = world(allocation, truths_of(allocation))
    first = allocation.keep(0.4)

    def recover(keep):
        is_other = allocation.share(keep) <= 0.4 and not torch.equal(keep, first)
        return Recovered(None, {ONE_PASS: 1e6, IN_SEQUENCE: 1e3}) if is_other else honest(keep)

    assert torch.equal(keep_in_rounds(allocation, lambda a: a.keep(0.4), recover, 2), first)


@pytest.mark.parametrize(("goal", "expected"), [({"budget": Budget(macs=0.5)}, True), ({"tolerance": 20.0}, False)])
def test_the_default_has_a_second_round_but_not_for_a_tolerance_on_a_cpu(goal, expected, monkeypatch):
    monkeypatch.setattr(rounds, "WORTHWHILE", float("inf"))
    entry, stages = ZOO[NAME], []
    batches = [entry.batch(60, seed=seed) for seed in range(5)]
    for name in ("best", "fast"):
        told = Told()
        recoup.prune(entry.build(12), batches, method=name, progress=told, **goal)
        stages.append(told.stages)
    assert ("second round" in stages[0]) is expected
    assert "second round" not in stages[1]


class Told:
    def __init__(self):
        self.stages = set()

    def __call__(self, stage, done, of):
        self.stages.add(stage)
