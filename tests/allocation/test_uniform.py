import pytest

import recoup
from recoup.allocation.uniform import keep_uniformly
from recoup.allocation.widths import widths_for
from recoup.channels.cost import cost
from recoup.config import Budget, Limits
from recoup.errors import BudgetError, UsageError
from tests.test_laws import calibrated
from tests.zoo import ZOO


def widths_of(seen, limits=None):
    return widths_for(seen, recoup.rank(seen), limits)


@pytest.mark.parametrize("of", ["macs", "parameters"])
@pytest.mark.parametrize("name", ["plain", "residual", "concat", "depthwise", "flattened"])
def test_a_budget_is_met_and_not_by_much(name, of):
    model, seen = calibrated(name, 16, recoup.Paper())
    whole, widths = getattr(cost(seen.structure, model), of), widths_of(seen)
    for share in (0.8, 0.5):
        kept = getattr(cost(seen.structure, model, keep_uniformly(seen, widths, Budget(**{of: share}))), of)
        assert 0.55 * share * whole < kept <= share * whole


def test_width_keeps_the_same_share_of_every_group():
    _, seen = calibrated("residual", 8, recoup.Paper())
    keep = keep_uniformly(seen, widths_of(seen), Budget(width=0.5))
    for group in seen.structure.prunable:
        assert int(keep[group.channels].sum()) <= -(-group.width // 2)
        assert int(keep[group.channels].sum()) >= 1


def test_a_budget_that_locked_channels_exceed_is_refused():
    _, seen = calibrated("unknown", 16, recoup.Paper())
    with pytest.raises(BudgetError, match=r"keeping 1.0% of the macs is out of reach: .* remain"):
        keep_uniformly(seen, widths_of(seen), Budget(macs=0.01))


@pytest.mark.parametrize("bad", [{}, {"macs": 0.5, "width": 0.5}, {"latency": 0.5, "width": 0.5}])
def test_a_budget_names_one_thing(bad):
    with pytest.raises(UsageError, match="exactly one of macs, parameters, width, latency; got"):
        Budget(**bad)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan")])
@pytest.mark.parametrize("of", ["macs", "latency"])
def test_a_budget_is_a_share(of, share):
    with pytest.raises(UsageError, match=rf"Budget\({of}=.*must lie above 0 and not above 1"):
        Budget(**{of: share})


def test_keeping_everything_is_allowed():
    entry = ZOO["plain"]
    model = entry.build(4)
    result = recoup.prune(model, [entry.batch()], budget=Budget(macs=1.0))
    assert result.report.macs_removed == 0


@pytest.mark.parametrize("budget", [Budget(macs=0.5), Budget(parameters=0.5), Budget(width=0.5)])
def test_widths_by_hand_and_the_least_width_are_kept_and_the_budget_is_met(budget):
    model, seen = calibrated("residual", 16, recoup.Paper())
    first, *others = seen.structure.prunable
    keep = keep_uniformly(seen, widths_of(seen, Limits({first.name: 13}, 5)), budget)
    assert int(keep[first.channels].sum()) == 13
    assert all(int(keep[group.channels].sum()) >= 5 for group in others)
    if budget.of != "width":
        whole, kept = (getattr(cost(seen.structure, model, mask), budget.of) for mask in (None, keep))
        assert 0.55 * 0.5 * whole < kept <= 0.5 * whole


def test_a_budget_that_the_least_width_exceeds_is_refused():
    _, seen = calibrated("residual", 16, recoup.Paper())
    with pytest.raises(BudgetError, match=r"keeping 10.0% of the macs is out of reach"):
        keep_uniformly(seen, widths_of(seen, Limits({}, 12)), Budget(macs=0.1))
