import pytest

import recoup
from recoup.errors import BudgetError, UsageError
from recoup.search import fit_budget
from recoup.settings import Budget, Settings
from recoup.structure.cost import cost
from tests.test_laws import calibrated
from tests.zoo import ZOO


@pytest.mark.parametrize("of", ["macs", "parameters"])
@pytest.mark.parametrize("name", ["plain", "residual", "concat", "depthwise", "flattened"])
def test_a_budget_is_met_and_not_by_much(name, of):
    model, seen = calibrated(name, 16, Settings())
    whole, rankings = getattr(cost(seen.structure, model), of), recoup.select(seen)
    for share in (0.8, 0.5):
        kept = getattr(cost(seen.structure, model, fit_budget(model, seen, rankings, Budget(**{of: share}))), of)
        assert 0.55 * share * whole < kept <= share * whole


def test_width_keeps_the_same_share_of_every_group():
    model, seen = calibrated("residual", 8, Settings())
    keep = fit_budget(model, seen, recoup.select(seen), Budget(width=0.5))
    for group in seen.structure.prunable:
        assert int(keep[group.channels].sum()) <= -(-group.width // 2)
        assert int(keep[group.channels].sum()) >= 1


def test_a_budget_that_locked_channels_exceed_is_refused():
    model, seen = calibrated("unknown", 16, Settings())
    with pytest.raises(BudgetError, match=r"keeping 1.0% of the macs is out of reach: .* remain"):
        fit_budget(model, seen, recoup.select(seen), Budget(macs=0.01))


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
