"""Masks that widths make, within limits."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import recoup
from recoup.allocation.widths import Widths, widths_for
from recoup.config import Limits
from recoup.errors import UsageError
from recoup.statistics.calibrate import ENOUGH_SAMPLES
from recoup.statistics.constant import Constants
from tests.test_laws import calibrated, calibration
from tests.zoo import ZOO

PLAIN, OTHER = "0.0.0", "0.2.0"


def widths_of(name, width=12, limits=None, **fields):
    _, seen = calibrated(name, width, recoup.Paper())
    return widths_for(dataclasses.replace(seen, method=recoup.Paper(**fields)), recoup.rank(seen), limits)


def with_constant(widths, *channels, samples=ENOUGH_SAMPLES):
    """The same where these channels were constant on so many samples."""
    mask = torch.zeros(widths.structure.width, dtype=torch.bool)
    mask[list(channels)] = True
    constants = Constants(mask, {group.name: samples for group in widths.structure.prunable})
    return dataclasses.replace(widths, constants=constants)


def counts(widths, keep):
    return {group.name: int(keep[group.channels].sum()) for group in widths.structure.prunable}


def test_limits_say_the_fewest_and_the_most():
    limits = Limits({"a": 5}, 3)
    assert (limits.least("a", 8), limits.most("a", 8)) == (5, 5)
    assert (limits.least("b", 8), limits.most("b", 8)) == (3, 8)
    assert (limits.least("b", 2), limits.most("b", 2)) == (2, 2)
    assert (Limits({}).least("a", 8), Limits({}).most("a", 8)) == (1, 8)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "4", None, float("nan")])
def test_limits_are_whole_numbers_of_channels(bad):
    with pytest.raises(UsageError, match="min_width must be a whole number of at least 1, got"):
        Limits({}, bad)
    with pytest.raises(UsageError, match=r"widths\['conv1'\] must be a whole number of at least 1, got"):
        Limits({"conv1": bad})


@pytest.mark.parametrize("name", ["plain", "residual", "concat", "depthwise", "flattened", "unknown"])
@given(share=st.floats(0.0, 1.0), least=st.integers(1, 14))
@settings(max_examples=20, deadline=None)
def test_every_group_keeps_at_least_the_least_width(name, share, least):
    widths = widths_of(name, limits=Limits({}, least))
    keep = widths.keep(widths.structure.prunable, share, widths.start())
    for group in widths.structure.prunable:
        assert widths.least(group) == max(min(least, group.width), group.width - group.free)
        assert int(keep[group.channels].sum()) >= widths.least(group)


@given(share=st.floats(0.0, 1.0), by_hand=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_a_width_by_hand_is_kept_to_the_channel_whatever_the_share(share, by_hand):
    widths = widths_of("residual", limits=Limits({"stem.0": by_hand}, 3))
    keep = widths.keep(widths.structure.prunable, share, widths.start())
    found = counts(widths, keep)
    assert found.pop("stem.0") == by_hand
    assert all(count >= 3 for count in found.values())
    group = widths.structure.group("stem.0")
    assert bool(keep[widths.order(group)[:by_hand]].all())


@pytest.mark.parametrize("count", [0, 3, 5, 12])
def test_a_cut_to_any_width_is_a_cut_to_the_one_by_hand(count):
    widths = widths_of("plain", limits=Limits({PLAIN: 5}))
    keep = widths.cut(widths.structure.group(PLAIN), count, widths.structure.keep_all())
    assert counts(widths, keep) == {PLAIN: 5, OTHER: 14}


def test_a_search_starts_with_all_channels_but_for_the_widths_by_hand():
    assert counts(widths_of("plain"), widths_of("plain").start()) == {PLAIN: 12, OTHER: 14}
    widths = widths_of("plain", limits=Limits({OTHER: 6}, 3))
    assert counts(widths, widths.start()) == {PLAIN: 12, OTHER: 6}


def test_a_search_may_start_without_constant_channels_but_not_below_a_width_by_hand():
    order = widths_of("plain").order(widths_of("plain").structure.group(OTHER))
    constant = (1, 4, int(order[0]), int(order[1]))
    widths = with_constant(widths_of("plain", limits=Limits({OTHER: 6})), *constant)
    assert counts(widths, widths.start()) == {PLAIN: 12, OTHER: 6}
    live = widths.without_constants().start()
    assert counts(widths, live) == {PLAIN: 10, OTHER: 6}
    assert not bool(live[[1, 4]].any())


@pytest.mark.parametrize(("samples", "left"), [(0, 12), (1, 12), (24, 12), (25, 11), (99, 9), (100, 8)])
def test_a_search_starts_without_as_many_constant_channels_as_samples_vouch_for(samples, left):
    widths = with_constant(widths_of("plain"), 1, 4, 5, 8, samples=samples).without_constants()
    keep = widths.start()
    assert counts(widths, keep) == {PLAIN: left, OTHER: 14}
    assert set((~keep).nonzero().flatten().tolist()) <= {1, 4, 5, 8}


@pytest.mark.parametrize("samples", [0, 10, 100])
def test_constant_channels_stay_when_all_channels_are_asked_for(samples):
    widths = with_constant(widths_of("plain"), *range(11), samples=samples)
    assert bool(widths.keep(widths.structure.prunable, 1.0, widths.start()).all())


@pytest.mark.parametrize("samples", [0, 10, 100])
def test_constant_channels_go_first_and_no_more_channels_than_asked_for(samples):
    """The best four by their rank were constant: they are the ones to go, down to half of the group."""
    whole = widths_of("plain")
    group = whole.structure.group(PLAIN)
    constant = whole.order(group)[:4].tolist()
    widths = with_constant(whole, *constant, samples=samples)
    for share, left in ((11 / 12, 11), (8 / 12, 8), (0.5, 6)):
        keep = widths.keep([group], share, widths.start())
        assert counts(widths, keep)[PLAIN] == left
        assert int(keep[constant].sum()) == max(0, left - 8)


def test_constant_channels_do_not_lower_a_width_by_hand():
    whole = widths_of("plain", limits=Limits({PLAIN: 5}))
    group = whole.structure.group(PLAIN)
    widths = with_constant(whole, *range(9)).without_constants()
    for share in (0.1, 1.0):
        assert counts(widths, widths.keep([group], share, widths.start()))[PLAIN] == 5


def test_cutting_another_group_does_not_lower_a_width_by_hand():
    widths = with_constant(widths_of("plain", limits=Limits({PLAIN: 12})), 3).without_constants()
    keep = widths.keep(widths.structure.prunable, 0.5, widths.start())
    assert counts(widths, keep) == {PLAIN: 12, OTHER: 7}


def test_a_cut_leaves_the_other_groups_as_they_are():
    widths = with_constant(widths_of("plain"), 3).without_constants()
    keep = widths.cut(widths.structure.group(OTHER), 5, widths.structure.keep_all())
    assert counts(widths, keep) == {PLAIN: 12, OTHER: 5}


def test_a_constant_channel_that_stays_for_the_multiple_survives_the_next_cut():
    widths = with_constant(widths_of("plain", multiple_of=4), 3).without_constants()
    keep = widths.keep(widths.structure.prunable, 1.0, widths.start())
    assert counts(widths, keep)[PLAIN] == 12


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_constant_channels_stay_where_fewer_than_the_least_width_would_be_left(share):
    widths = with_constant(widths_of("plain", limits=Limits({}, 6)), *range(8)).without_constants()
    group = widths.structure.group(PLAIN)
    assert counts(widths, widths.start())[PLAIN] == 6
    assert counts(widths, widths.keep([group], share, widths.start()))[PLAIN] == 6


def test_channels_that_vary_come_before_constant_ones_where_a_layer_would_be_empty():
    widths = with_constant(widths_of("plain"), *range(11))
    keep = widths.cut(widths.structure.group(PLAIN), 1, widths.start())
    assert keep[:12].nonzero().squeeze(1).tolist() == [11]


def test_multiples_hold_for_all_groups_but_those_with_a_width_by_hand():
    widths = widths_of("residual", limits=Limits({"stem.0": 5}, 2), multiple_of=4)
    for share in (0.1, 0.5, 0.8):
        found = counts(widths, widths.keep(widths.structure.prunable, share, widths.start()))
        assert found.pop("stem.0") == 5
        whole = {group.name: group.width for group in widths.structure.prunable}
        assert all(count % 4 == 0 or count == whole[name] for name, count in found.items())


def test_without_limits_a_group_may_be_cut_to_its_last_channel():
    widths = widths_of("plain")
    assert isinstance(widths, Widths) and widths.limits == Limits({})
    assert counts(widths, widths.keep(widths.structure.prunable, 0.0, widths.start())) == {PLAIN: 1, OTHER: 1}


METHODS = [recoup.Best(), recoup.Fast(), recoup.Paper(classifier=True), recoup.Released(classifier=True)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_method_keeps_widths_by_hand_and_the_least_width(method):
    entry = ZOO["plain"]
    model = entry.build(12)
    data = [entry.batch(60)]
    result = recoup.prune(model, data, method=method, budget=recoup.Budget(macs=0.6), widths={PLAIN: 10}, min_width=3)
    rows = {row.name: row.after for row in result.report.groups}
    assert rows[PLAIN] == 10 and rows[OTHER] >= 3
    assert result.report.macs_removed >= 0.4
    assert result.model[0][0][0].out_channels == 10


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_widths_by_hand_alone_leave_the_other_groups_whole(method):
    entry = ZOO["plain"]
    result = recoup.prune(entry.build(12), [entry.batch(60)], method=method, widths={"0.0": 7})
    rows = {row.name: row.after for row in result.report.groups}
    assert (rows[PLAIN], rows[OTHER]) == (7, 14)


def test_a_constant_channel_does_not_lower_a_width_by_hand_of_a_whole_run():
    entry = ZOO["flattened"]
    model = entry.build(8)
    model[0].bias.data[3] = -100.0
    seen = calibration(recoup.trace(model, entry.batch()), [entry.batch(60)], recoup.Paper())
    for width in (8, 7, 4):
        allocation = recoup.allocate(seen, recoup.rank(seen), recoup.Goal(widths={"0": width}))
        assert int(allocation.keep[seen.structure.group("0").channels].sum()) == width
        assert recoup.apply(model, recoup.recover(seen, allocation).plan)[0].out_channels == width


@pytest.mark.parametrize("method", [recoup.Fast(), recoup.Paper(classifier=True)], ids=["Fast", "Paper"])
def test_widths_by_hand_that_lose_more_than_the_tolerance_are_told_of(method):
    entry = ZOO["plain"]

    def evaluate(model):
        return 90.0 if model[0][0][0].out_channels == 12 else 50.0

    with pytest.warns(recoup.RecoupWarning, match="tolerance"):
        recoup.prune(
            entry.build(12), [entry.batch(60)], method=method, tolerance=1.0, evaluate=evaluate, widths={PLAIN: 6}
        )


def test_where_all_that_is_searched_has_its_width_by_hand_the_paper_keeps_these():
    _, seen = calibrated("plain", 12, recoup.Paper())
    goal = recoup.Goal(tolerance=1.0, evaluate=lambda _: 90.0, widths={PLAIN: 6})
    assert int(recoup.allocate(seen, recoup.rank(seen), goal).keep[:12].sum()) == 6
