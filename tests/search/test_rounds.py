import pytest
import torch

import recoup
from recoup.search import rounds
from recoup.search.rounds import keep_in_rounds, reconsidered
from recoup.settings import PRESETS, Budget
from recoup.variants import ONCE
from tests.search.test_measured import allocation_of
from tests.zoo import ZOO

NAME = "residual"


def world(allocation, truths, once=10.0):
    """A network in which every group does its expected harm times a factor of its own."""
    asked = []

    def measure(keep):
        asked.append(keep)
        found = sum(
            truths[name] * float(allocation.harms[name].curve[n]) for name, n in allocation.counts(keep).items()
        )
        return {ONCE: once * found, "in sequence": found}

    return measure, asked


def halved(allocation):
    """The mask that cuts every group to half of its channels."""
    structure = allocation.widths.structure
    keep = structure.keep_all()
    for group in structure.prunable:
        keep = allocation.widths.cut(group, group.width // 2, keep)
    return keep


def truths_of(allocation):
    return {name: 0.5 + number for number, name in enumerate(allocation.harms)}


def test_harms_become_what_they_are_in_the_pruned_network():
    allocation = allocation_of(NAME)
    truths = truths_of(allocation)
    measure, asked = world(allocation, truths)
    again = reconsidered(allocation, halved(allocation), measure)
    assert len(asked) == 1 + len(truths)
    for name, harm in again.harms.items():
        torch.testing.assert_close(harm.curve, truths[name] * allocation.harms[name].curve)
        assert harm.least == allocation.harms[name].least


def test_neighbours_are_asked_together_where_there_are_many(monkeypatch):
    monkeypatch.setattr(rounds, "LOOKS", 2)
    allocation = allocation_of(NAME)
    measure, asked = world(allocation, dict.fromkeys(allocation.harms, 3.0))
    again = reconsidered(allocation, halved(allocation), measure)
    assert len(allocation.harms) > 2 and len(asked) == 3
    for name, harm in again.harms.items():
        torch.testing.assert_close(harm.curve, 3 * allocation.harms[name].curve)


def test_a_group_that_is_whole_gets_the_mean_and_none_less_than_a_share_of_it():
    allocation = allocation_of(NAME)
    first, second, *_ = allocation.harms
    keep = halved(allocation)
    keep[allocation.widths.structure.group(first).channels] = True
    truths = {**dict.fromkeys(allocation.harms, 2.0), second: -1.0}
    again = reconsidered(allocation, keep, world(allocation, truths)[0])
    mean = (2.0 * (len(truths) - 2) - 1.0) / (len(truths) - 1)
    torch.testing.assert_close(again.harms[first].curve, mean * allocation.harms[first].curve)
    torch.testing.assert_close(again.harms[second].curve, rounds.LEAST * mean * allocation.harms[second].curve)


def test_where_recovery_changes_little_one_round_will_do():
    allocation = allocation_of(NAME)
    measure, asked = world(allocation, truths_of(allocation), once=1.2)
    assert reconsidered(allocation, halved(allocation), measure) is allocation
    assert len(asked) == 1


def test_nothing_cut_is_nothing_to_ask():
    allocation = allocation_of(NAME)
    measure, _ = world(allocation, truths_of(allocation))
    assert reconsidered(allocation, allocation.keep(1.0), measure) is allocation


def test_the_second_round_does_less_harm_in_the_same_budget():
    allocation = allocation_of(NAME)
    measure, asked = world(allocation, truths_of(allocation))
    first, second = (keep_in_rounds(allocation, lambda a: a.keep(0.4), measure, n) for n in (1, 2))
    assert min(measure(second).values()) < min(measure(first).values())
    assert allocation.share(second) <= 0.4
    assert len({keep.numpy().tobytes() for keep in asked}) == len(asked) - 2  # the two of this test


def test_a_second_round_that_does_more_harm_is_not_kept():
    allocation = allocation_of(NAME)
    honest, _ = world(allocation, truths_of(allocation))
    first = allocation.keep(0.4)

    def measure(keep):
        is_other = allocation.share(keep) <= 0.4 and not torch.equal(keep, first)
        return {ONCE: 1e6, "in sequence": 1e3} if is_other else honest(keep)

    assert torch.equal(keep_in_rounds(allocation, lambda a: a.keep(0.4), measure, 2), first)


@pytest.mark.parametrize(("goal", "expected"), [({"budget": Budget(macs=0.5)}, True), ({"tolerance": 20.0}, False)])
def test_the_default_has_a_second_round_but_not_for_a_tolerance_on_a_cpu(goal, expected, monkeypatch):
    monkeypatch.setattr(rounds, "WORTHWHILE", float("inf"))
    entry, stages = ZOO[NAME], []
    batches = [entry.batch(60, seed=seed) for seed in range(5)]
    for name in ("best", "fast"):
        told = Told()
        recoup.prune(entry.build(12), batches, preset=PRESETS[name], progress=told, **goal)
        stages.append(told.stages)
    assert ("second round" in stages[0]) is expected
    assert "second round" not in stages[1]


class Told:
    def __init__(self):
        self.stages = set()

    def __call__(self, stage, done, of):
        self.stages.add(stage)
