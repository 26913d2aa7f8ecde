import pytest
import torch

import recoup
from recoup.allocation.latency import NEAR, RETRIES, Latency, keep_within_time
from recoup.allocation.measured import keep_within
from recoup.allocation.timing import operation_timings
from recoup.allocation.uniform import keep_uniformly
from recoup.allocation.widths import widths_for
from recoup.channels.cost import cost
from recoup.config import Budget
from recoup.errors import BudgetError, UsageError
from recoup.inputs.batches import Inputs
from tests.allocation.test_measured import allocation_of, allocator_for, prepared
from tests.timers import Work
from tests.zoo import ZOO


def latency_allocation(name, timer, width=12):
    _, seen, reference = prepared(name, width)
    batch, traced = ZOO[name].batch(4), seen.traced
    timings = operation_timings(traced.standalone.host, traced.structure, Inputs((batch,), {}), timer)
    return allocator_for(seen, reference, "latency", timings=timings), timings


class KnownTime:
    """The share of the time is a known function of the modelled share."""

    def __init__(self, allocation, function, asked):
        self.allocation, self.function, self.asked, self.measured = allocation, function, asked, []

    def __call__(self, keep, /):
        self.measured.append(self.function(self.allocation.share(keep)))
        return Latency(2.0, 2.0 * self.measured[-1], self.asked)


def found_with(function, share, allocation=None):
    allocation = allocation or allocation_of("plain", width=24)
    measure = KnownTime(allocation, function, share)
    return keep_within_time(allocation, Budget(latency=share), measure), measure


@pytest.mark.parametrize("name", ["plain", "residual", "depthwise", "shared"])
def test_where_seconds_are_macs_the_masks_are_those_for_macs(name):
    allocation, timings = latency_allocation(name, Work())
    assert allocation.whole == pytest.approx(sum(timing.seconds for timing in timings.values()))
    for share in (0.8, 0.5):
        keep = keep_within(allocation, Budget(latency=share))
        assert torch.equal(keep, keep_within(allocation_of(name), Budget(macs=share)))


@pytest.mark.parametrize("unit", [1e-15, 1.0])
def test_the_unit_of_time_does_not_matter(unit):
    work = Work(layer=3000.0, element=20.0)
    allocation, _ = latency_allocation("residual", lambda run, device: unit * work(run, device))
    reference, _ = latency_allocation("residual", work)
    for share in (0.9, 0.6):
        assert torch.equal(allocation.keep(share), reference.keep(share))


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_time_that_does_not_shrink_is_made_up_for(share):
    work = Work(layer=2000.0, element=10.0)
    model, seen, _ = prepared("residual")
    allocation, _ = latency_allocation("residual", work)
    keep = keep_within(allocation, Budget(latency=share))
    assert 0.9 * share < allocation.share(keep) <= share
    assert cost(seen.structure, model, keep).macs < 0.95 * share * cost(seen.structure, model).macs


def test_a_budget_below_what_does_not_shrink_is_refused():
    allocation, _ = latency_allocation("plain", Work(layer=1e9))
    assert allocation.least > 0.9
    with pytest.raises(
        BudgetError,
        match=rf"50.0% of the latency is out of reach: .* {allocation.least:.1%} remain, .* does not depend",
    ):
        keep_within_time(allocation, Budget(latency=0.5), lambda keep: pytest.fail("nothing to measure"))


def test_a_model_of_the_time_that_is_right_is_believed_at_once():
    found, measure = found_with(lambda share: share, 0.5)
    assert len(measure.measured) == 1
    assert found.latency.is_met and found.latency.share == measure.measured[0]
    assert torch.equal(found.keep, allocation_of("plain", width=24).keep(0.5))


CURVES = {
    "a part that never shrinks": lambda share: 0.25 + 0.75 * share,
    "slower than modelled": lambda share: share**0.75,
    "in steps": lambda share: -(-share // 0.08) * 0.08,
}


@pytest.mark.parametrize("curve", CURVES)
def test_where_networks_are_slower_than_modelled_the_widths_are_cut_further(curve):
    found, measure = found_with(CURVES[curve], 0.6)
    assert measure.measured[0] > 0.6
    assert 1 < len(measure.measured) <= 1 + RETRIES
    assert found.latency.is_met
    assert found.latency.share == max(share for share in measure.measured if share <= 0.6)
    assert found.latency.share == pytest.approx(CURVES[curve](measure.allocation.share(found.keep)))


def test_where_networks_are_faster_than_modelled_more_is_kept():
    found, measure = found_with(lambda share: share**2, 0.5)
    assert measure.measured[0] < 0.3
    assert (1 - NEAR) * 0.5 <= found.latency.share <= 0.5


def test_a_jump_is_approached_from_both_sides():
    found, measure = found_with(lambda share: 0.3 if share < 0.55 else 0.9, 0.6)
    assert measure.measured[:2] == [0.9, 0.3] and len(measure.measured) == 1 + RETRIES
    assert found.latency.share == 0.3
    assert 0.5 < measure.allocation.share(found.keep) < 0.55  # the first that was fast enough has less than 0.4


def test_where_none_is_fast_enough_the_fastest_is_kept():
    found, measure = found_with(lambda share: 0.7 + 0.1 * share, 0.6)
    assert len(measure.measured) == 1 + RETRIES
    assert not found.latency.is_met
    assert found.latency.share == min(measure.measured)


def test_it_ends_where_there_is_nothing_left_to_try():
    allocation = allocation_of("plain", width=24)
    least = allocation.least + 1e-9
    found, measure = found_with(lambda share: 0.9, least, allocation)
    assert len(measure.measured) == 1
    assert not found.latency.is_met


def test_progress_is_told_of_every_network():
    allocation, told = allocation_of("plain", width=24), []
    measure = KnownTime(allocation, lambda share: 0.9, 0.6)
    keep_within_time(allocation, Budget(latency=0.6), measure, lambda *step: told.append(step))
    assert told == [("time networks", number, 1 + RETRIES) for number in range(1, 2 + RETRIES)]


def test_without_timings_there_is_no_latency():
    _, seen, reference = prepared("plain")
    with pytest.raises(UsageError, match="need timings"):
        allocator_for(seen, reference, "latency")


def test_the_same_share_of_every_group_is_not_found_for_a_latency():
    _, seen, _ = prepared("plain")
    with pytest.raises(UsageError, match="a latency budget needs widths that are measured: .* method='best' or 'fast'"):
        keep_uniformly(seen, widths_for(seen, recoup.rank(seen)), Budget(latency=0.5))


def test_widths_are_multiples_here_too():
    _, seen, _ = prepared("residual", 16, multiple_of=4)
    allocation = allocation_of("residual", "macs", 16, multiple_of=4)
    found, _ = found_with(lambda share: 0.2 + 0.8 * share, 0.6, allocation)
    for group in seen.structure.prunable:
        count = int(found.keep[group.channels].sum())
        assert count % 4 == 0 or count == group.width
