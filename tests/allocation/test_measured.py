import functools
from dataclasses import replace

import pytest
import torch

import recoup
from recoup.algebra.selection import loss_along
from recoup.allocation import measured
from recoup.allocation.lagrangian import error_curve
from recoup.allocation.measured import Allocator, cost_model, keep_within, measure_errors
from recoup.allocation.widths import widths_for
from recoup.channels.cost import cost
from recoup.config import Budget, Limits
from recoup.errors import BudgetError
from recoup.inputs.batches import Inputs
from recoup.judge.output_error import Reference
from recoup.progress import silent
from recoup.recovery.one_pass import one_pass_weights
from recoup.statistics.rank import problem_of
from tests.zoo import ZOO

NAMES = pytest.mark.parametrize(
    "name", ["plain", "flattened", "residual", "depthwise", "concat", "shared", "gates", "perceptron", "scaled"]
)


@functools.cache
def prepared(name, width=12, **fields):
    return prepared_of(ZOO[name].build(width), name, recoup.Fast(**fields))


def prepared_of(model, name, method, samples=60, *, constant=False):
    """A model of the zoo with its statistics, on images or on flat grey, and other images to judge by."""
    entry = ZOO[name]
    images = entry.batch(samples)
    data = recoup.split(model, [torch.zeros_like(images) if constant else images], held_out=False)
    seen = recoup.calibrate(recoup.trace(model, entry.batch(2)), data, method)
    batch = entry.batch(40, seed=2)
    reference = Reference(seen.traced.standalone.host, [Inputs(batch if isinstance(batch, tuple) else (batch,), {})])
    return model, seen, reference


@functools.cache
def allocation_of(name, of="macs", width=12, **fields):
    _, seen, reference = prepared(name, width, **fields)
    return allocator_for(seen, reference, of)


def allocator_for(seen, reference, of="macs", progress=silent, *, timings=None, limits=None):
    rankings = recoup.rank(seen)
    widths = widths_for(seen, rankings, limits)
    costs = cost_model(seen, widths, of, timings)
    return Allocator(widths, measure_errors(seen, rankings, widths, reference, progress), costs)


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


def test_the_output_error_of_a_group_is_measured_with_that_group_alone_cut():
    _, seen, reference = prepared("residual")
    rankings, allocation = recoup.rank(seen), allocation_of("residual")
    for group in seen.structure.prunable:
        curve, measured = allocation.curves[group.name], {}
        for count in {round(0.75 * group.width), round(0.25 * group.width)}:
            keep = seen.structure.keep_all()
            keep[group.channels] = False
            keep[rankings[group.name].order[:count] + group.start] = True
            measured[count] = reference.error(one_pass_weights(seen, keep))
            assert float(curve.errors[count]) == pytest.approx(measured[count], rel=1e-9)
        assert float(curve.errors[-1]) == pytest.approx(0.0, abs=1e-9)
        torch.testing.assert_close(curve.errors, error_curve(rankings[group.name].loss, measured, 1).errors)
        assert (curve.least, curve.most) == (1, group.width)


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


def with_constant_channels(*channels, samples=100):
    """The plain network, of which these channels of the first group never pass the activation."""
    model = ZOO["plain"].build(8)
    model[0][0][1].bias.data[list(channels)] = -100.0
    _, seen, reference = prepared_of(model, "plain", recoup.Fast(), samples)
    return seen, reference


def test_constant_channels_stay_when_all_of_the_budget_is_there_and_go_first_otherwise():
    allocator = allocator_for(*with_constant_channels(2))
    assert bool(allocator.keep(1.0).all())
    assert allocator.keep(0.999).logical_not().nonzero().squeeze(1).tolist() == [2]


def test_on_the_way_to_a_tolerance_constant_channels_go_whatever_the_share():
    whole = allocator_for(*with_constant_channels(2, 5))
    allocator = replace(whole, widths=whole.widths.without_constants())
    assert allocator.keep(1.0).logical_not().nonzero().squeeze(1).tolist() == [2, 5]


@pytest.mark.parametrize("samples", [100, 10])
def test_a_group_is_not_cut_further_than_the_rest_for_what_few_samples_say(samples):
    """Seven of the eight were constant: that they go costs nothing that was measured."""
    seen, reference = with_constant_channels(*range(1, 8), samples=samples)
    keep = allocator_for(seen, reference).keep(0.5)
    left = int(keep[seen.structure.prunable[0].channels].sum())
    assert left >= 4 if samples == 10 else left < 4


def test_a_budget_that_is_out_of_reach_otherwise_is_met_with_what_few_samples_say():
    seen, reference = with_constant_channels(*range(1, 8), samples=10)
    allocator = allocator_for(seen, reference)
    keep = keep_within(allocator, Budget(macs=allocator.least + 1e-9))
    assert int(keep[seen.structure.prunable[0].channels].sum()) == 1


def test_where_nothing_varied_all_groups_lose_alike():
    model = ZOO["plain"].build(8)
    _, seen, reference = prepared_of(model, "plain", recoup.Fast(), 30, constant=True)
    keep = allocator_for(seen, reference).keep(0.4)
    shares = [float(keep[group.channels].double().mean()) for group in seen.structure.prunable]
    assert all(0.4 < share < 0.8 for share in shares)


def test_a_budget_that_locked_channels_exceed_is_refused():
    allocation = allocation_of("unknown")
    assert allocation.least > 0.01
    with pytest.raises(
        BudgetError, match=rf"keeping 1.0% of the macs is out of reach: .* {allocation.least:.1%} remain"
    ):
        keep_within(allocation, Budget(macs=0.01))


@pytest.mark.parametrize("selector", ["l2", "random"])
def test_a_selector_that_knows_no_loss_gets_that_of_its_order(selector):
    _, seen, reference = prepared("plain", selector=selector)
    rankings = recoup.rank(seen)
    assert all(ranking.loss is None for ranking in rankings.values())
    allocator = allocator_for(seen, reference)
    told = {
        name: recoup.Ranking(ranking.order, loss_along(problem_of(seen, seen.structure.group(name)), ranking.order))
        for name, ranking in rankings.items()
    }
    widths = widths_for(seen, told)
    for name, curve in measure_errors(seen, told, widths, reference).items():
        assert torch.equal(curve.errors, allocator.curves[name].errors)


def test_the_loss_is_that_along_the_order_that_is_cut():
    """Channel 2 has the largest filter and is constant: it is cut first, and the loss has to know."""
    model = ZOO["plain"].build(12)
    with torch.no_grad():
        model[0][0][0].weight[2] *= 1e3
        model[0][0][1].weight[2], model[0][0][1].bias[2] = 0, 0
    _, seen, reference = prepared_of(model, "plain", recoup.Fast(selector="l2"))
    ranking, group = recoup.rank(seen)["0.0.0"], seen.structure.group("0.0.0")
    widths = widths_for(seen, recoup.rank(seen))
    order = widths.order(group) - group.start
    assert int(ranking.order[0]) == 2 and int(order[-1]) == 2
    along = loss_along(problem_of(seen, group), order)
    told = {**recoup.rank(seen), group.name: recoup.Ranking(order, along)}
    expected = measure_errors(seen, told, widths_for(seen, told), reference)[group.name]
    found = measure_errors(seen, recoup.rank(seen), widths, reference)[group.name]
    assert torch.equal(found.errors, expected.errors)


@pytest.mark.parametrize("together", [0, measured.TOGETHER])
def test_groups_are_measured_as_many_at_a_time_as_may_be_held(together, monkeypatch):
    _, seen, reference = prepared("plain")
    known, told = allocator_for(seen, reference), []
    monkeypatch.setattr(measured, "TOGETHER", together)
    found = allocator_for(seen, reference, "macs", lambda *step: told.append(step))
    assert told[-1] == ("measure groups", 2, 2)
    assert told == sorted(told)
    assert len(set(told)) == (1 if together else 2)
    for name, curve in found.curves.items():
        torch.testing.assert_close(curve.errors, known.curves[name].errors, rtol=1e-6, atol=1e-12)


def test_an_allocator_can_be_made_of_known_parts():
    """Two groups that cost the same, one of them worth everything."""
    whole = allocation_of("perceptron", width=12)
    (first, second) = whole.curves
    worthless = replace(whole.curves[first], errors=0 * whole.curves[first].errors)
    curves = {first: worthless, second: whole.curves[second]}
    keep = Allocator(whole.widths, curves, whole.costs).keep(0.7)
    structure = whole.widths.structure
    assert int(keep[structure.group(first).channels].sum()) < int(
        whole.keep(0.7)[structure.group(first).channels].sum()
    )
    assert whole.share(keep) <= 0.7


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_a_width_by_hand_is_kept_at_every_share_and_the_others_are_decided(share):
    model, seen, reference = prepared("residual")
    group = seen.structure.prunable[1]
    allocation = allocator_for(seen, reference, limits=Limits({group.name: 5}))
    keep = keep_within(allocation, Budget(macs=share))
    assert int(keep[group.channels].sum()) == 5
    assert cost(seen.structure, model, keep).macs <= share * cost(seen.structure, model).macs
    assert (allocation.curves[group.name].least, allocation.curves[group.name].most) == (5, 5)
    assert int(allocation.keep(1.0)[group.channels].sum()) == 5


def test_a_width_by_hand_keeps_the_best_channels():
    _, seen, reference = prepared("residual")
    group = seen.structure.prunable[0]
    keep = allocator_for(seen, reference, limits=Limits({group.name: 5})).keep(0.6)
    best = recoup.rank(seen)[group.name].order[:5].sort().values
    assert torch.equal(keep[group.channels].nonzero().squeeze(1), best.cpu())


@pytest.mark.parametrize("name", ["plain", "residual", "concat", "perceptron"])
def test_no_group_is_cut_below_the_least_width(name):
    _, seen, reference = prepared(name)
    allocation = allocator_for(seen, reference, limits=Limits({}, 4))
    keep = keep_within(allocation, Budget(macs=allocation.least + 1e-9))
    for group in seen.structure.prunable:
        assert int(keep[group.channels].sum()) == max(min(4, group.width), group.width - group.free)
    assert allocation.least > allocation_of(name).least


def test_a_budget_below_the_widths_by_hand_is_refused():
    _, seen, reference = prepared("plain")
    limits = Limits({group.name: group.width for group in seen.structure.prunable})
    allocation = allocator_for(seen, reference, limits=limits)
    assert allocation.least == pytest.approx(1.0)
    with pytest.raises(BudgetError, match=r"keeping 50.0% of the macs is out of reach: .* 100.0% remain"):
        keep_within(allocation, Budget(macs=0.5))


def test_constant_channels_do_not_lower_a_width_by_hand():
    """All eight are asked for, one of them constant; the same group without a width by hand may lose it."""
    seen, reference = with_constant_channels(2)
    first, second = seen.structure.prunable

    def widths_with(limits):
        whole = allocator_for(seen, reference, limits=limits)
        keep = replace(whole, widths=whole.widths.without_constants()).keep(1.0)
        return [int(keep[group.channels].sum()) for group in (first, second)]

    assert widths_with(Limits({first.name: 8}))[0] == 8
    assert widths_with(Limits({second.name: 4})) == [7, 4]
