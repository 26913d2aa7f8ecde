import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.allocation.lagrangian import ErrorCurve, _fill, cheapest, error_curve
from recoup.channels.cost_model import CostModel, Side, Term


def costs_of(*terms):
    names = dict.fromkeys(name for term in terms for side in term.sides for name in side.kept)
    by_group = {n: tuple(term for term in terms if any(n in side.kept for side in term.sides)) for n in names}
    return CostModel(tuple(terms), by_group)


def side(name, width):
    return Side(0, {name: torch.arange(width + 1, dtype=torch.float64)})


def chain(widths, first=3, last=4):
    """Layers one after the other: every cost is a product of two neighbouring widths."""
    sides = [side(f"g{number}", width) for number, width in enumerate(widths)]
    middle = [Term(1.0, pair) for pair in itertools.pairwise(sides)]
    return costs_of(Term(first, sides[:1]), *middle, Term(last, sides[-1:]))


def apart(widths, prices):
    """Groups that cost so much per channel each, whatever the others keep."""
    return costs_of(
        *(Term(price, (side(f"g{n}", w),)) for n, (w, price) in enumerate(zip(widths, prices, strict=True)))
    )


def falling(width, scale, power=1.0):
    """A convex curve that ends at no error: scale · (n^-power - width^-power), and much more without any channel."""
    n = torch.arange(1, width + 1, dtype=torch.float64)
    curve = scale * (n**-power - width**-power)
    return torch.cat([3 * curve[:1] + 3 * scale, curve])


def curves_of(*curves, least=1):
    return {f"g{number}": curve_of(errors, least) for number, errors in enumerate(curves)}


def curve_of(errors, least=1, most=None):
    return ErrorCurve(errors, least, len(errors) - 1 if most is None else most)


def total_error(curves, counts):
    return sum(float(curves[name].errors[n]) for name, n in counts.items())


def whole(curves):
    return {name: curve.width for name, curve in curves.items()}


def by_brute_force(curves, costs, allowed):
    """The least error of all widths that cost no more."""
    ranges = [range(curve.least, curve.most + 1) for curve in curves.values()]
    every = (dict(zip(curves, counts, strict=True)) for counts in itertools.product(*ranges))
    return min(total_error(curves, counts) for counts in every if costs.total(counts) <= allowed)


@st.composite
def problems(draw):
    widths = draw(st.lists(st.integers(2, 7), min_size=2, max_size=3))
    curves = [falling(width, draw(st.floats(0.1, 3.0)), draw(st.floats(0.5, 2.0))) for width in widths]
    return widths, curves_of(*curves), draw(st.floats(0.4, 1.0))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_where_all_channels_cost_the_same_no_other_widths_err_less(problem):
    widths, curves, share = problem
    costs = apart(widths, [2.0] * len(widths))
    allowed = max(share * costs.total(whole(curves)), costs.total(dict.fromkeys(curves, 1)))
    found = cheapest(curves, costs, allowed)
    assert costs.total(found) <= allowed
    assert total_error(curves, found) == pytest.approx(by_brute_force(curves, costs, allowed), abs=1e-9)


def test_in_chains_hardly_any_other_widths_err_less():
    """One price for all groups reaches only the convex hull: nearly always the optimum, and never far from it."""
    generator = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(40):
        widths = torch.randint(3, 8, (3,), generator=generator).tolist()
        numbers = torch.rand(3, 2, generator=generator).tolist()
        curves = curves_of(*(falling(w, 3 * a + 0.1, 1.5 * b + 0.5) for w, (a, b) in zip(widths, numbers, strict=True)))
        costs = chain(widths)
        for share in (0.4, 0.6, 0.8):
            allowed = share * costs.total(whole(curves))
            gaps.append(total_error(curves, cheapest(curves, costs, allowed)) / by_brute_force(curves, costs, allowed))
    gaps = torch.tensor(gaps)
    assert float(gaps.min()) >= 1 - 1e-9
    assert float(gaps.median()) == pytest.approx(1.0)
    assert float(gaps.mean()) < 1.03
    assert float(gaps.max()) < 1.5


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_cost_is_never_above_what_is_allowed_and_the_rest_of_it_buys_no_channel(problem):
    widths, curves, share = problem
    costs = chain(widths)
    allowed = max(share * costs.total(whole(curves)), costs.total(dict.fromkeys(curves, 1)))
    found = cheapest(curves, costs, allowed)
    assert costs.total(found) <= allowed
    for name, count in found.items():
        assert 1 <= count <= curves[name].width
        if count < curves[name].width:
            assert costs.total({**found, name: count + 1}) > allowed


def test_a_larger_budget_errs_less():
    curves, costs = curves_of(falling(12, 1.0), falling(12, 2.0, 0.7)), chain([12, 12])
    every = [total_error(curves, cheapest(curves, costs, share * costs.total(whole(curves)))) for share in
             (0.2, 0.4, 0.6, 0.8, 1.0)]  # fmt: skip
    assert every == sorted(every, reverse=True)
    assert every[-1] == 0


def test_all_is_kept_where_the_budget_allows_it():
    curves, costs = curves_of(falling(5, 1.0), falling(9, 2.0)), chain([5, 9])
    assert cheapest(curves, costs, costs.total(whole(curves))) == {"g0": 5, "g1": 9}


def test_the_least_budget_leaves_the_least():
    curves, costs = curves_of(falling(5, 1.0), falling(9, 2.0)), chain([5, 9])
    assert cheapest(curves, costs, costs.total({"g0": 1, "g1": 1})) == {"g0": 1, "g1": 1}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77])
def test_equal_groups_get_equal_widths(share):
    """Up to a single channel that was left over."""
    curves = curves_of(*[falling(16, 1.0)] * 4)
    costs = apart([16] * 4, [3.0] * 4)
    counts = cheapest(curves, costs, share * costs.total(whole(curves))).values()
    assert max(counts) - min(counts) <= 1


def test_the_group_that_causes_more_error_keeps_more():
    curves = curves_of(falling(16, 1.0), falling(16, 20.0))
    costs = apart([16, 16], [1.0, 1.0])
    found = cheapest(curves, costs, 16)
    assert found["g1"] > found["g0"]
    assert sum(found.values()) == 16


def test_the_group_that_costs_more_keeps_less():
    curves = curves_of(falling(16, 1.0), falling(16, 1.0))
    costs = apart([16, 16], [1.0, 10.0])
    found = cheapest(curves, costs, 0.5 * costs.total(whole(curves)))
    assert found["g0"] > found["g1"]


def test_a_group_that_causes_no_error_is_cut_to_the_least():
    curves = {"g0": curve_of(torch.zeros(9, dtype=torch.float64), 1), "g1": curve_of(falling(8, 1.0), 1)}
    costs = apart([8, 8], [1.0, 1.0])
    assert cheapest(curves, costs, 9.0) == {"g0": 1, "g1": 8}


def test_no_group_is_cut_below_its_least():
    curves = {"g0": curve_of(falling(8, 0.01), 5), "g1": curve_of(falling(8, 10.0), 2)}
    costs = apart([8, 8], [1.0, 1.0])
    for allowed in (7.0, 9.0, 12.0):
        found = cheapest(curves, costs, allowed)
        assert found["g0"] >= 5
        assert found["g1"] >= 2


@given(problems(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_group_keeps_between_its_least_and_its_most(problem, data):
    """The limits hold at any price, and within them the cost stays below what is allowed."""
    widths, curves, share = problem
    for name, curve in curves.items():
        least = data.draw(st.integers(1, curve.width), f"least of {name}")
        curves[name] = curve_of(curve.errors, least, data.draw(st.integers(least, curve.width), f"most of {name}"))
    costs = chain(widths)
    least = costs.total({name: curve.least for name, curve in curves.items()})
    allowed = max(share * costs.total(whole(curves)), least)
    found = cheapest(curves, costs, allowed)
    assert all(curve.least <= found[name] <= curve.most for name, curve in curves.items())
    assert costs.total(found) <= allowed
    for name, count in found.items():
        if count < curves[name].most:
            assert costs.total({**found, name: count + 1}) > allowed


@pytest.mark.parametrize("share", [0.4, 0.7, 1.0])
def test_a_group_whose_least_is_its_most_keeps_that_and_the_others_share_the_rest(share):
    """However useful its channels are, or useless."""
    costs = apart([8, 8], [1.0, 1.0])
    for scale in (1e-3, 1e3):
        curves = {"g0": curve_of(falling(8, scale), 3, 3), "g1": curve_of(falling(8, 1.0))}
        assert cheapest(curves, costs, share * 16) == {"g0": 3, "g1": min(8, int(share * 16) - 3)}


def test_a_curve_may_be_cut_to_any_width_unless_told_otherwise():
    loss = torch.tensor([4.0, 2.0, 1.0, 0.0])
    assert (error_curve(loss, {2: 0.3}, 1).least, error_curve(loss, {2: 0.3}, 1).most) == (1, 3)
    assert (error_curve(loss, {2: 0.3}, 2, 2).least, error_curve(loss, {2: 0.3}, 2, 2).most) == (2, 2)
    assert error_curve(loss, {2: 0.3}, 2, 2).width == 3


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_the_unit_of_the_error_does_not_matter(scale):
    costs, curves = chain([8, 9]), (falling(8, 1.0), falling(9, 2.0, 0.7))
    expected = cheapest(curves_of(*curves), costs, 0.5 * 135)
    assert cheapest(curves_of(*(scale * curve for curve in curves)), costs, 0.5 * 135) == expected


def errors_of(loss, measured):
    return error_curve(torch.tensor(loss), measured, 1).errors.tolist()


def test_a_curve_is_scaled_to_what_was_measured():
    assert errors_of([4.0, 2.0, 1.0, 0.0], {2: 0.3}) == pytest.approx([1.2, 0.6, 0.3, 0.0])


def test_between_two_measurements_the_error_is_a_power_of_the_loss_and_goes_on_so_beyond():
    """From 1 to 4 the loss doubles twice while the error grows ninefold: its power is log 3 / log 2."""
    found = errors_of([8.0, 4.0, 2.0, 1.0, 0.5, 0.0], {3: 0.1, 1: 0.9})
    assert found == pytest.approx([2.7, 0.9, 0.3, 0.1, 0.05, 0.0])


def test_beyond_what_was_measured_the_error_grows_no_slower_than_the_loss_and_no_faster_than_its_cube():
    assert errors_of([8.0, 4.0, 1.0, 0.0], {2: 0.1, 1: 0.11}) == pytest.approx([0.22, 0.11, 0.1, 0.0])
    assert errors_of([8.0, 4.0, 2.0, 0.0], {2: 1e-3, 1: 1.0}) == pytest.approx([8.0, 1.0, 1e-3, 0.0])


def test_the_error_never_falls_as_channels_go():
    found = errors_of([8.0, 4.0, 2.0, 1.0, 0.0], {3: 0.3, 1: 0.2})
    assert found == sorted(found, reverse=True)


def test_measurements_at_the_same_loss_are_one():
    assert errors_of([2.0, 1.0, 1.0, 0.0], {2: 0.1, 1: 0.3}) == pytest.approx([0.6, 0.3, 0.3, 0.0])


def test_what_causes_no_error_or_even_helps_counts_for_nothing():
    for error in (0.0, -0.1):
        assert max(errors_of([4.0, 2.0, 1.0, 0.0], {2: error, 1: error})) < 1e-10


@pytest.mark.parametrize("unit", [1.0, 1e-13])
def test_what_is_left_goes_to_the_most_useful_channel_per_cost_in_any_unit(unit):
    """A single channel of the dearer group would help more than one of the cheaper, but less than three."""
    curves = curves_of(torch.tensor([9.0, 2.0, 0.0]), torch.tensor([9.0, 4.0, 3.0, 2.0, 1.0, 0.0]))
    costs = apart([2, 5], [3 * unit, unit])
    assert _fill({"g0": 1, "g1": 1}, curves, costs, 7.5 * unit) == {"g0": 1, "g1": 4}
