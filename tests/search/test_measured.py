import functools
from dataclasses import replace

import pytest
import torch

import recoup
from recoup.batches import Inputs
from recoup.errors import BudgetError, UsageError
from recoup.judging.harm import Reference
from recoup.recover import Compensator
from recoup.search.allocation import harm_of
from recoup.search.measured import Allocator, allocator, keep_within
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
