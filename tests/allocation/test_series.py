import torch

import recoup
from recoup.allocation.lagrangian import ErrorCurve, cheapest
from recoup.allocation.series import TiedCosts, members_of, spread, tied
from recoup.channels.cost_model import CostModel, Side, Term
from tests.language import batches, build


def costs():
    """Groups a and b of four channels, each behind a layer of its own, and c of two."""
    by = {"a": 4, "b": 4, "c": 2}
    terms = {
        name: Term(factor, (Side(1, {name: torch.arange(by[name] + 1.0)}),))
        for name, factor in (("a", 3.0), ("b", 5.0), ("c", 2.0))
    }
    return CostModel(tuple(terms.values()), {name: (term,) for name, term in terms.items()})


MEMBERS = {"a": ("a", "b"), "c": ("c",)}


def test_the_cost_of_a_series_is_that_of_all_its_groups():
    together = TiedCosts(costs(), MEMBERS)
    assert together.total({"a": 2, "c": 1}) == costs().total({"a": 2, "b": 2, "c": 1})
    along = together.along("a", {"a": 0, "c": 1})
    totals = torch.tensor([together.total({"a": n, "c": 1}) for n in range(5)])
    torch.testing.assert_close(along - along[0], totals - totals[0])


def test_no_width_is_out_of_reach_for_one_of_them_and_errors_add_up():
    a = ErrorCurve(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.0]), 1, 4)
    b = ErrorCurve(torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]), 2, 3)
    both = tied({"a": a, "b": b, "c": a}, MEMBERS)["a"]
    assert both.errors.tolist() == [12.0, 7.0, 4.0, 2.0, 0.0]
    assert (both.least, both.most) == (2, 3)


def test_the_cheapest_widths_are_the_same_for_all_groups_of_a_series():
    curve = ErrorCurve(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.0]).double(), 1, 4)
    small = ErrorCurve(torch.tensor([9.0, 3.0, 0.0]).double(), 1, 2)
    together = TiedCosts(costs(), MEMBERS)
    counts = cheapest(tied({"a": curve, "b": curve, "c": small}, MEMBERS), together, 32.0)
    assert spread(counts, MEMBERS)["a"] == spread(counts, MEMBERS)["b"]
    assert together.total(counts) <= 32.0
    assert together.total({**counts, "a": counts["a"] + 1}) > 32.0


def test_groups_of_their_own_stand_for_themselves():
    plain = recoup.trace(build(), batches(1)[0]).structure
    assert all(names == (name,) for name, names in members_of(plain).items())
    held = recoup.trace(build(), batches(1)[0], keep_config=True).structure
    assert members_of(held) == {
        "blocks.0.attention.qkv": ("blocks.0.attention.qkv", "blocks.1.attention.qkv"),
        "blocks.0.up": ("blocks.0.up", "blocks.1.up"),
    }
