"""Every selector of the literature against its formula, written out slowly."""

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.algebra.selection import (
    SELECTORS,
    Flow,
    Layer,
    Problem,
    SingleMaps,
    ask,
    forward,
    looks_at_images,
    loss_along,
)
from recoup.algebra.selection.contributions import contributions
from recoup.algebra.selection.feature_rank import mean_ranks
from recoup.algebra.selection.lasso import opening_order
from recoup.errors import UsageError
from tests.oracles import costs_of_single_channels, gates_by_coordinate_descent, loss, rows_of, thinet_from_rows

WIDTH = 5


@dataclass
class Told:
    """Evidence that is given beforehand."""

    gammas: torch.Tensor
    makers: torch.Tensor
    seen: tuple
    slopes: tuple
    passed: Flow

    @classmethod
    def random(cls, width, layers=1, seed=0, positions=(4, 3)):
        torch.manual_seed(seed)
        maps = tuple(torch.randn(7, width, *positions).relu() for _ in range(layers))
        slopes = tuple(torch.randn_like(each) for each in maps)
        return cls(torch.randn(width, 2), torch.randn(width, 4), maps, slopes, Flow(*torch.rand(2, width)))

    def scales(self):
        return self.gammas

    def folded(self):
        return self.makers

    def maps(self):
        return self.seen

    def single_maps(self):
        """Every map as one; a channel that is zero everywhere is not read."""
        return tuple(
            SingleMaps(each[:, :, None], each.transpose(0, 1).flatten(1).any(1)[:, None]) for each in self.seen
        )

    def gradients(self):
        return self.slopes

    def flow(self):
        return self.passed


def rows_and_layer(seed, rows=2, outputs=3, extra=1, width=WIDTH):
    """Raw inputs (n, d) that are far from centred, and the layer that reads them."""
    generator = torch.Generator().manual_seed(seed)
    d = width * rows + extra
    X = torch.randn(60, d, generator=generator, dtype=torch.float64) @ torch.randn(d, d, generator=generator).double()
    X += torch.randn(d, generator=generator).double()
    W = torch.randn(d, outputs, generator=generator, dtype=torch.float64)
    channel_of = torch.cat([torch.arange(width).repeat_interleave(rows), torch.full((extra,), -1)])
    return X, Layer(torch.cov(X.T, correction=0), W, channel_of, X.mean(0))


def problem(*layers, seed=0, evidence=None, free=None, ridge=0.0):
    filters = torch.randn(WIDTH, 6, generator=torch.Generator().manual_seed(seed))
    return Problem(WIDTH, layers, torch.ones(WIDTH).bool() if free is None else free, filters, ridge, 0, evidence)


def best_first(scores):
    return sorted(range(len(scores)), key=lambda c: -float(scores[c]))


def order(name, asked):
    return ask(asked, name, "group").order.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_selectors_of_filters_are_their_formulas(seed):
    asked = problem(rows_and_layer(seed)[1], seed=seed)
    w = asked.filters
    assert order("l1", asked) == best_first([sum(abs(x) for x in row) for row in w.tolist()])
    assert order("fpgm", asked) == best_first([sum(float((a - b).norm()) for b in w) for a in w])


def test_fpgm_tells_near_copies_apart_from_far_ones():
    """Three filters that differ by a millionth are nearest to the median; the quick distance would call them equal."""
    filters = torch.cat([1000 + 1e-6 * torch.eye(3), torch.randn(2, 3)]).double()
    asked = replace(problem(rows_and_layer(0)[1]), filters=filters)
    assert set(order("fpgm", asked)[:2]) == {3, 4}


@pytest.mark.parametrize("seed", range(3))
def test_lookahead_is_maker_times_readers(seed):
    one, two = rows_and_layer(seed)[1], rows_and_layer(seed + 10, rows=1)[1]
    told = Told.random(WIDTH, seed=seed)

    def score(c, makers):
        read = sum(float(layer.weight[layer.channel_of == c].square().sum()) for layer in (one, two))
        return float(makers[c].norm()) * read**0.5

    asked = problem(one, two, seed=seed)
    assert order("lookahead", asked) == best_first([score(c, asked.filters) for c in range(WIDTH)])
    known = replace(asked, evidence=told)
    assert order("lookahead", known) == best_first([score(c, told.makers) for c in range(WIDTH)])


def test_bn_scale_adds_the_sizes_of_all_factors():
    gammas = torch.tensor([[1.0, -1.0], [0.1, 0.1], [-3.0, 0.0], [0.0, 0.0], [0.5, 0.6]])
    asked = problem(rows_and_layer(0)[1], evidence=replace(Told.random(WIDTH), gammas=gammas))
    assert order("bn-scale", asked) == [2, 0, 4, 1, 3]


def test_bn_scale_without_a_batch_norm_names_the_group_and_what_to_do():
    asked = problem(rows_and_layer(0)[1], evidence=replace(Told.random(WIDTH), gammas=torch.zeros(WIDTH, 0)))
    with pytest.raises(UsageError, match=r"^stem: bn-scale .*pass none\. Leave the group out \(exclude=.*such as 'l2'"):
        ask(asked, "bn-scale", "stem")


def two_readers(seed):
    """Two layers, the second of which reads channels 1 to 4 only, and what they see."""
    one, two = rows_and_layer(seed)[1], rows_and_layer(seed + 5, rows=1)[1]
    two = replace(two, channel_of=torch.where(two.channel_of == 0, -1, two.channel_of))
    told = Told.random(WIDTH, layers=2, seed=seed)
    for values in (told.seen[1], told.slopes[1]):
        values[:, 0] = 0
    return problem(one, two, evidence=told), told


@pytest.mark.parametrize("seed", range(3))
def test_apoz_counts_zeros_where_the_channel_is_read(seed):
    asked, told = two_readers(seed)
    shares = []
    for c in range(WIDTH):
        values = [v for maps in (told.seen if c else told.seen[:1]) for v in maps[:, c].flatten().tolist()]
        shares.append(1 - values.count(0.0) / len(values))
    assert order("apoz", asked) == best_first(shares)


@pytest.mark.parametrize("seed", range(3))
def test_taylor_squares_the_term_of_every_sample(seed):
    asked, told = two_readers(seed)
    scores = []
    for c in range(WIDTH):
        terms = [
            sum(float((a[n, c] * g[n, c]).sum()) for a, g in zip(told.seen, told.slopes, strict=True)) for n in range(7)
        ]
        scores.append(sum(term**2 for term in terms))
    assert order("taylor", asked) == best_first(scores)


def test_taylor_takes_maps_without_positions():
    told = Told.random(WIDTH, positions=())
    scores = (told.seen[0] * told.slopes[0]).square().sum(0)
    assert order("taylor", problem(rows_and_layer(0)[1], evidence=told)) == best_first(scores)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8)])
def test_mean_ranks_are_those_of_the_singular_values(shape):
    torch.manual_seed(0)
    ranks = torch.randint(0, 6, (4, 3))
    low = [1e4 * torch.randn(shape[0], r) @ torch.randn(r, shape[1]) for r in ranks.flatten().tolist()]
    maps = torch.stack(low).view(4, 3, *shape)
    torch.testing.assert_close(mean_ranks(maps), torch.linalg.matrix_rank(maps).double().mean(0))
    torch.testing.assert_close(mean_ranks(maps), ranks.double().mean(0))


def test_hrank_prefers_high_ranks_and_among_equal_ones_the_larger():
    maps = torch.zeros(2, WIDTH, 4, 4)
    for channel, (rank, size) in enumerate([(1, 9), (3, 1), (2, 1), (2, 5), (0, 1)]):
        maps[:, channel] = size * torch.diag((torch.arange(4) < rank).float())
    asked = problem(rows_and_layer(0)[1], evidence=replace(Told.random(WIDTH), seen=(maps,)))
    assert order("hrank", asked) == [1, 3, 2, 0, 4]


@dataclass
class Seen:
    """Evidence of single maps alone."""

    given: tuple

    def single_maps(self):
        return self.given


def order_by_maps(name, *given):
    return order(name, problem(rows_and_layer(0)[1], evidence=Seen(given)))


def test_hrank_ranks_every_map_alone():
    """Channel 0 is read at two places: two maps of rank 3 and 1, 2 on average, and no matrix of rank 4."""
    values = torch.zeros(2, WIDTH, 2, 4, 4)
    values[:, 0, 0, :3, :3], values[:, 0, 1, 3, 3] = torch.eye(3), 1
    for channel, rank in enumerate((4, 3, 1, 4), start=1):
        values[:, channel, 0] = torch.diag((torch.arange(4) < rank).float())
    is_read = torch.tensor([[True, channel == 0] for channel in range(WIDTH)])
    assert order_by_maps("hrank", SingleMaps(values, is_read)) == [1, 4, 2, 0, 3]


def test_among_equal_ranks_the_size_is_the_mean_over_readers():
    """Channel 0 is read once and is larger; the others are read twice, and their sum is larger."""
    once, again = torch.ones(3, WIDTH, 1), torch.ones(3, WIDTH, 1)
    once[:, 0], again[:, 0] = 1.2, 0
    given = SingleMaps(once, torch.ones(WIDTH, 1).bool()), SingleMaps(again, torch.arange(WIDTH)[:, None] > 0)
    assert order_by_maps("hrank", *given)[0] == 0


def test_apoz_does_not_count_what_is_not_read():
    """Every channel is half zero; channel 4 is read at one place, and the zeros at the other are none of its own."""
    values = (torch.arange(8) % 2).float().expand(3, WIDTH, 2, 8).clone()
    values[0, 4, 0, 0] = 1
    values[:, 4, 1] = 0
    is_read = torch.ones(WIDTH, 2).bool()
    is_read[4, 1] = False
    assert order_by_maps("apoz", SingleMaps(values, is_read)) == [4, 0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_of_the_maps_is_no_rank(dtype):
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(2, 5, 3, 32, 2)).Q
    maps = (left @ torch.diag(torch.tensor([1.0, 0.5])) @ right.mT).to(dtype)
    assert mean_ranks(maps).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["l1", "l2", "fpgm", "lookahead"])
def test_channels_that_no_weight_makes_are_refused_by_name(name):
    asked = replace(problem(rows_and_layer(0)[1]), filters=torch.zeros(WIDTH, 0))
    with pytest.raises(UsageError, match=rf"^stem: {name} looks at the weights that make channels.*no layer.*exclude="):
        ask(asked, name, "stem")


def test_random_draws_another_order_for_another_group_and_the_same_again():
    asked = Problem(50, (), torch.ones(50).bool(), torch.ones(50, 1), 0.0, seed=3)
    orders = [order("random", replace(asked, name=name)) for name in ("a", "b", "a")]
    assert orders[0] != orders[1] and orders[0] == orders[2]
    assert order("random", replace(asked, name="a", seed=4)) != orders[0]


def test_nisp_and_synflow_rank_by_the_flow():
    told = Told.random(WIDTH)
    asked = problem(rows_and_layer(0)[1], evidence=told)
    assert order("nisp", asked) == best_first(told.passed.importance)
    assert order("synflow", asked) == best_first(told.passed.through)


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_thinet_is_the_greedy_listing_on_raw_rows(seed, rows):
    (X, one), (Y, two) = rows_and_layer(seed, rows), rows_and_layer(seed + 1, rows=1, outputs=2)
    assert order("thinet", problem(one)) == thinet_from_rows([(X, one.weight, one.channel_of)], WIDTH)
    assert order("thinet", problem(one, two)) == thinet_from_rows([as_one_layer((X, one), (Y, two))], WIDTH)


def as_one_layer(*pairs):
    """Layers side by side as one with as many outputs, each relative to the sum of what its channels contribute."""
    blocks = []
    for X, layer in pairs:
        parts = [X[:, layer.channel_of == c] @ layer.weight[layer.channel_of == c] for c in range(WIDTH)]
        size = sum(float(part.square().sum()) for part in parts) ** 0.5
        blocks.append(layer.weight / size)
    weight = torch.block_diag(*blocks)
    return torch.cat([X for X, _ in pairs], dim=1), weight, torch.cat([layer.channel_of for _, layer in pairs])


def test_contributions_are_the_second_moments_of_what_is_read():
    X, one = rows_and_layer(3)
    parts = torch.stack([X[:, one.channel_of == c] @ one.weight[one.channel_of == c] for c in range(WIDTH)])
    M = torch.einsum("inj,knj->ik", parts, parts) / len(X)
    torch.testing.assert_close(contributions(problem(one)), M, rtol=1e-9, atol=1e-12)
    both = contributions(problem(one, replace(one, weight=3 * one.weight)))
    torch.testing.assert_close(both, 2 * M / M.trace(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["thinet", "lasso"])
def test_a_reader_whose_contributions_cancel_counts(name):
    """The second reader gets a channel and its negative: nothing in all, but each of them matters to it."""
    X = torch.randn(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[:, [0, 0, 1, 1, 1]]
    W = torch.tensor([[5.0], [-5.0], [0], [0], [0]], dtype=torch.float64)
    cancelling = Layer(torch.cov(X.T, correction=0), W, torch.arange(WIDTH), X.mean(0))
    alone = contributions(problem(cancelling))
    assert float(alone.sum().abs()) < 1e-9 and float(alone[0, 0]) > 1
    other = Layer(torch.eye(WIDTH).double(), torch.ones(WIDTH, 1).double(), torch.arange(WIDTH))
    both = contributions(problem(other, cancelling))
    assert float(both[0, 0]) > 2 * float(both[2, 2])
    assert sorted(order(name, problem(other, cancelling))) == list(range(WIDTH))


@pytest.mark.parametrize("name", ["thinet", "lasso", "lookahead"])
def test_parts_of_a_layer_are_looked_at_as_one(name):
    """A layer in eight parts, one of them large, ranks as the layer itself does beside another one."""
    one, two = rows_and_layer(1, outputs=8)[1], rows_and_layer(2, rows=1)[1]
    parts = tuple(replace(one, weight=one.weight[:, n : n + 1] * 10.0**-n, scale=1.0) for n in range(8))
    apart = replace(problem(one, two), layers=(*parts, two), whole=(one, two))
    assert order(name, apart) == order(name, problem(one, two))


@pytest.mark.parametrize("name", ["forward", "backward", "obs", "thinet", "lasso"])
def test_a_part_that_weighs_little_decides_little(name):
    G, channel_of = torch.eye(WIDTH).double(), torch.arange(WIDTH)
    large = Layer(G, torch.linspace(1, 0.5, WIDTH).double()[:, None], channel_of, scale=3.0)
    small = Layer(G, 1e-3 * torch.linspace(1, 5, WIDTH).double()[:, None], channel_of, scale=3.0)
    assert order(name, problem(large, small)) == [0, 1, 2, 3, 4]


def test_parts_of_a_layer_do_not_disturb_those_who_look_at_maps():
    one, two = rows_and_layer(1)[1], rows_and_layer(2, rows=1)[1]
    told = Told.random(WIDTH, layers=2)
    apart = replace(problem(one, two, evidence=told), layers=(one,) * 8 + (two,), whole=(one, two))
    for name in ("apoz", "hrank", "taylor"):
        assert order(name, apart) == order(name, problem(one, two, evidence=told))


@given(st.integers(0, 10_000), st.integers(2, 6))
@settings(max_examples=8, deadline=None)
def test_gates_open_where_coordinate_descent_opens_them(seed, width):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width + 2, generator=generator, dtype=torch.float64)
    M = mixing @ mixing.T
    prices = float(M.sum(1).abs().max()) * torch.logspace(0, -3, 80, dtype=torch.float64)
    first = torch.full((width,), len(prices))
    for number in reversed(range(len(prices))):
        is_open = gates_by_coordinate_descent(M, float(prices[number])).abs() > 1e-9
        first[is_open] = number
    places = first[opening_order(M)]
    assert bool((places[1:] >= places[:-1]).all()), (first.tolist(), opening_order(M).tolist())


def test_a_copy_of_an_open_gate_never_opens():
    X = torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = torch.stack([X[:, 0], 0.5 * X[:, 1], X[:, 0], 2 * X[:, 2], 0.1 * X[:, 3]], dim=1)
    ranked = opening_order(parts.T @ parts).tolist()
    assert ranked[-1] in (0, 2) and len(set(ranked)) == 5


@pytest.mark.parametrize("seed", range(4))
def test_obs_is_the_cost_of_losing_one_channel(seed):
    one, two = rows_and_layer(seed)[1], rows_and_layer(seed + 7, rows=1)[1]
    raw = [(each.covariance, each.weight, each.channel_of) for each in (one, two)]
    assert order("obs", problem(one, two)) == best_first(costs_of_single_channels(raw, WIDTH))


@given(st.integers(0, 10_000), st.permutations(range(WIDTH)))
@settings(max_examples=25, deadline=None)
def test_the_loss_along_any_order_is_the_error_of_solving_from_scratch(seed, given_order):
    layers = [rows_and_layer(seed)[1], rows_and_layer(seed + 1, rows=1)[1]]
    found = loss_along(problem(*layers), torch.tensor(given_order))
    nothing = torch.zeros(0).long()
    for n in range(WIDTH + 1):
        kept = given_order[:n]
        expected = sum(
            loss(each.covariance, each.weight, rows_of(each.channel_of, kept))
            / loss(each.covariance, each.weight, nothing)
            for each in layers
        )
        assert float(found[n]) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_the_loss_along_forwards_own_order_is_forwards_loss():
    free = torch.tensor([True, False, True, True, True])
    asked = problem(rows_and_layer(0)[1], free=free, ridge=1e-3)
    ranking = forward(asked)
    torch.testing.assert_close(loss_along(asked, ranking.order), ranking.loss)


def test_the_loss_along_an_order_does_not_mind_dependent_channels():
    X = torch.randn(100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    X = torch.cat([X, X[:, :1]], dim=1)
    one = Layer(torch.cov(X.T), torch.ones(5, 1, dtype=torch.float64), torch.arange(5))
    found = loss_along(problem(one), torch.tensor([0, 4, 1, 2, 3]))
    assert float(found[1]) == pytest.approx(float(found[2]))
    assert float(found[-1]) == 0 and bool((found.diff() <= 0).all())


NEEDING = {
    "taylor": "gradients", "hrank": "feature maps", "apoz": "feature maps", "bn-scale": "batch norms",
    "nisp": "absolute weights", "synflow": "absolute weights",
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTORS)
def test_a_problem_made_by_hand_serves_or_says_what_it_lacks(name):
    asked = Problem(WIDTH, (rows_and_layer(0)[1],), torch.ones(WIDTH).bool(), torch.randn(WIDTH, 3), 1e-6, 0)
    if name not in NEEDING:
        assert sorted(order(name, asked)) == list(range(WIDTH))
        return
    with pytest.raises(UsageError, match=f"^stem: {name} looks at .*{NEEDING[name]}.*does not have.*evidence"):
        ask(asked, name, "stem")


def test_images_are_kept_for_those_who_may_look_at_them():
    assert {name for name in SELECTORS if looks_at_images(name)} == {"taylor", "hrank", "apoz"}
    assert looks_at_images(lambda asked: torch.arange(asked.width))
    assert not looks_at_images(forward)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_layer_whose_inputs_never_vary_disturbs_nobody(name):
    one = rows_and_layer(0)[1]
    still = Layer(torch.zeros_like(one.covariance), one.weight, one.channel_of)
    asked = problem(still, evidence=Told.random(WIDTH), ridge=1e-6)
    assert sorted(order(name, asked)) == list(range(WIDTH))
