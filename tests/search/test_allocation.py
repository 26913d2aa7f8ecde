import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.search.allocation import Harm, _fill, allocate, harm_of
from recoup.structure.terms import Side, Term, Terms


def terms_of(*terms):
    names = dict.fromkeys(name for term in terms for side in term.sides for name in side.kept)
    by_group = {n: tuple(term for term in terms if any(n in side.kept for side in term.sides)) for n in names}
    return Terms(tuple(terms), by_group)


def side(name, width):
    return Side(0, {name: torch.arange(width + 1, dtype=torch.float64)})


def chain(widths, first=3, last=4):
    """Layers one after the other: every cost is a product of two neighbouring widths."""
    sides = [side(f"g{number}", width) for number, width in enumerate(widths)]
    middle = [Term(1.0, pair) for pair in itertools.pairwise(sides)]
    return terms_of(Term(first, sides[:1]), *middle, Term(last, sides[-1:]))


def apart(widths, prices):
    """Groups that cost so much per channel each, whatever the others keep."""
    return terms_of(
        *(Term(price, (side(f"g{n}", w),)) for n, (w, price) in enumerate(zip(widths, prices, strict=True)))
    )


def falling(width, scale, power=1.0):
    """A convex curve that ends at no harm: scale · (n^-power - width^-power), and much more without any channel."""
    n = torch.arange(1, width + 1, dtype=torch.float64)
    curve = scale * (n**-power - width**-power)
    return torch.cat([3 * curve[:1] + 3 * scale, curve])


def harms_of(*curves, least=1):
    return {f"g{number}": Harm(curve, least) for number, curve in enumerate(curves)}


def total_harm(harms, counts):
    return sum(float(harms[name].curve[n]) for name, n in counts.items())


def whole(harms):
    return {name: len(harm.curve) - 1 for name, harm in harms.items()}


def by_brute_force(harms, terms, allowed):
    """The least harm of all widths that cost no more."""
    ranges = [range(harm.least, len(harm.curve)) for harm in harms.values()]
    every = (dict(zip(harms, counts, strict=True)) for counts in itertools.product(*ranges))
    return min(total_harm(harms, counts) for counts in every if terms.total(counts) <= allowed)


@st.composite
def problems(draw):
    widths = draw(st.lists(st.integers(2, 7), min_size=2, max_size=3))
    curves = [falling(width, draw(st.floats(0.1, 3.0)), draw(st.floats(0.5, 2.0))) for width in widths]
    return widths, harms_of(*curves), draw(st.floats(0.4, 1.0))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_where_all_channels_cost_the_same_no_other_widths_do_less_harm(problem):
    widths, harms, share = problem
    terms = apart(widths, [2.0] * len(widths))
    allowed = max(share * terms.total(whole(harms)), terms.total(dict.fromkeys(harms, 1)))
    found = allocate(harms, terms, allowed)
    assert terms.total(found) <= allowed
    assert total_harm(harms, found) == pytest.approx(by_brute_force(harms, terms, allowed), abs=1e-9)


def test_in_chains_hardly_any_other_widths_do_less_harm():
    """One price for all groups reaches only the convex hull: nearly always the optimum, and never far from it."""
    generator = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(40):
        widths = torch.randint(3, 8, (3,), generator=generator).tolist()
        numbers = torch.rand(3, 2, generator=generator).tolist()
        harms = harms_of(*(falling(w, 3 * a + 0.1, 1.5 * b + 0.5) for w, (a, b) in zip(widths, numbers, strict=True)))
        terms = chain(widths)
        for share in (0.4, 0.6, 0.8):
            allowed = share * terms.total(whole(harms))
            gaps.append(total_harm(harms, allocate(harms, terms, allowed)) / by_brute_force(harms, terms, allowed))
    gaps = torch.tensor(gaps)
    assert float(gaps.min()) >= 1 - 1e-9
    assert float(gaps.median()) == pytest.approx(1.0)
    assert float(gaps.mean()) < 1.03
    assert float(gaps.max()) < 1.5


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_cost_is_never_above_what_is_allowed_and_the_rest_of_it_buys_no_channel(problem):
    widths, harms, share = problem
    terms = chain(widths)
    allowed = max(share * terms.total(whole(harms)), terms.total(dict.fromkeys(harms, 1)))
    found = allocate(harms, terms, allowed)
    assert terms.total(found) <= allowed
    for name, count in found.items():
        assert 1 <= count <= len(harms[name].curve) - 1
        if count + 1 < len(harms[name].curve):
            assert terms.total({**found, name: count + 1}) > allowed


def test_a_larger_budget_does_less_harm():
    harms, terms = harms_of(falling(12, 1.0), falling(12, 2.0, 0.7)), chain([12, 12])
    every = [total_harm(harms, allocate(harms, terms, share * terms.total(whole(harms)))) for share in
             (0.2, 0.4, 0.6, 0.8, 1.0)]  # fmt: skip
    assert every == sorted(every, reverse=True)
    assert every[-1] == 0


def test_all_is_kept_where_the_budget_allows_it():
    harms, terms = harms_of(falling(5, 1.0), falling(9, 2.0)), chain([5, 9])
    assert allocate(harms, terms, terms.total(whole(harms))) == {"g0": 5, "g1": 9}


def test_the_least_budget_leaves_the_least():
    harms, terms = harms_of(falling(5, 1.0), falling(9, 2.0)), chain([5, 9])
    assert allocate(harms, terms, terms.total({"g0": 1, "g1": 1})) == {"g0": 1, "g1": 1}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77])
def test_equal_groups_get_equal_widths(share):
    """Up to a single channel that was left over."""
    harms = harms_of(*[falling(16, 1.0)] * 4)
    terms = apart([16] * 4, [3.0] * 4)
    counts = allocate(harms, terms, share * terms.total(whole(harms))).values()
    assert max(counts) - min(counts) <= 1


def test_the_group_that_does_more_harm_keeps_more():
    harms = harms_of(falling(16, 1.0), falling(16, 20.0))
    terms = apart([16, 16], [1.0, 1.0])
    found = allocate(harms, terms, 16)
    assert found["g1"] > found["g0"]
    assert sum(found.values()) == 16


def test_the_group_that_costs_more_keeps_less():
    harms = harms_of(falling(16, 1.0), falling(16, 1.0))
    terms = apart([16, 16], [1.0, 10.0])
    found = allocate(harms, terms, 0.5 * terms.total(whole(harms)))
    assert found["g0"] > found["g1"]


def test_a_group_that_does_no_harm_is_cut_to_the_least():
    harms = {"g0": Harm(torch.zeros(9, dtype=torch.float64), 1), "g1": Harm(falling(8, 1.0), 1)}
    terms = apart([8, 8], [1.0, 1.0])
    assert allocate(harms, terms, 9.0) == {"g0": 1, "g1": 8}


def test_no_group_is_cut_below_its_least():
    harms = {"g0": Harm(falling(8, 0.01), 5), "g1": Harm(falling(8, 10.0), 2)}
    terms = apart([8, 8], [1.0, 1.0])
    for allowed in (7.0, 9.0, 12.0):
        found = allocate(harms, terms, allowed)
        assert found["g0"] >= 5
        assert found["g1"] >= 2


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_the_unit_of_harm_does_not_matter(scale):
    terms, curves = chain([8, 9]), (falling(8, 1.0), falling(9, 2.0, 0.7))
    expected = allocate(harms_of(*curves), terms, 0.5 * 135)
    assert allocate(harms_of(*(scale * curve for curve in curves)), terms, 0.5 * 135) == expected


def curve_of(loss, measured):
    return harm_of(torch.tensor(loss), measured, 1).curve.tolist()


def test_a_curve_is_scaled_to_what_was_measured():
    assert curve_of([4.0, 2.0, 1.0, 0.0], {2: 0.3}) == pytest.approx([1.2, 0.6, 0.3, 0.0])


def test_between_two_measurements_harm_is_a_power_of_the_loss_and_goes_on_so_beyond():
    """From 1 to 4 the loss doubles twice while the harm grows ninefold: its power is log 3 / log 2."""
    found = curve_of([8.0, 4.0, 2.0, 1.0, 0.5, 0.0], {3: 0.1, 1: 0.9})
    assert found == pytest.approx([2.7, 0.9, 0.3, 0.1, 0.05, 0.0])


def test_beyond_what_was_measured_harm_grows_no_slower_than_the_loss_and_no_faster_than_its_cube():
    assert curve_of([8.0, 4.0, 1.0, 0.0], {2: 0.1, 1: 0.11}) == pytest.approx([0.22, 0.11, 0.1, 0.0])
    assert curve_of([8.0, 4.0, 2.0, 0.0], {2: 1e-3, 1: 1.0}) == pytest.approx([8.0, 1.0, 1e-3, 0.0])


def test_harm_never_falls_as_channels_go():
    found = curve_of([8.0, 4.0, 2.0, 1.0, 0.0], {3: 0.3, 1: 0.2})
    assert found == sorted(found, reverse=True)


def test_measurements_at_the_same_loss_are_one():
    assert curve_of([2.0, 1.0, 1.0, 0.0], {2: 0.1, 1: 0.3}) == pytest.approx([0.6, 0.3, 0.3, 0.0])


def test_what_does_not_harm_or_even_helps_counts_for_nothing():
    for harm in (0.0, -0.1):
        assert max(curve_of([4.0, 2.0, 1.0, 0.0], {2: harm, 1: harm})) < 1e-10


@pytest.mark.parametrize("unit", [1.0, 1e-13])
def test_what_is_left_goes_to_the_most_useful_channel_per_cost_in_any_unit(unit):
    """A single channel of the dearer group would help more than one of the cheaper, but less than three."""
    harms = harms_of(torch.tensor([9.0, 2.0, 0.0]), torch.tensor([9.0, 4.0, 3.0, 2.0, 1.0, 0.0]))
    terms = apart([2, 5], [3 * unit, unit])
    assert _fill({"g0": 1, "g1": 1}, harms, terms, 7.5 * unit) == {"g0": 1, "g1": 4}
