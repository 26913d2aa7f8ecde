"""Grouped convolutions of few groups: every part keeps as many channels, each its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.algebra.selection import Layer, Problem, backward, loss_along
from recoup.channels.parts import evened, gathered, in_turn, spread
from recoup.errors import UsageError
from tests.oracles import least_squares, loss, unfolded

# One pass over every position, as exact as float64 allows.
EXACT = recoup.Paper(weighting="none", ridge=1e-12, positions=None, classifier=True)


class Block(nn.Module):
    """What a ResNeXt block has: a layer, a grouped convolution, another layer; `body` may do more between them."""

    def __init__(self, groups=2, inputs=16, outputs=24, between=lambda m, h: h, **extra):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, inputs, 1), nn.Conv2d(outputs, 4, 1)
        self.norm, self.between = nn.BatchNorm2d(inputs), between
        self.grouped = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups)
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x):
        h = torch.tanh(self.norm(self.a(x)))
        return self.b(torch.tanh(self.between(self, self.grouped(h))))


class Twice(nn.Module):
    """Its input beside what it makes of it: two parts of the same channels."""

    def forward(self, x):
        return torch.cat([x, x.relu()], 1)


def pictures(count=60):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1)).double()


def built(*args, **kwargs):
    torch.manual_seed(0)
    return Block(*args, **kwargs).double().eval()


def sizes(model, **options):
    """Width, free channels and parts of every group that can lose some."""
    groups = recoup.trace(model, pictures(2), **options).structure.prunable
    return {group.name: (group.width, group.free, group.step) for group in groups}


def test_inputs_and_outputs_of_few_groups_go_by_themselves_the_same_number_in_each():
    model = built()
    assert sizes(model) == {"a": (16, 16, 2), "grouped": (24, 24, 2)}
    result = recoup.prune(model, [pictures()], widths={"a": 6, "grouped": 18}, method="fast")
    assert result.report.proof.difference < 1e-10
    grouped = result.model.grouped
    assert type(result.model) is Block
    assert (grouped.groups, grouped.in_channels, grouped.out_channels) == (2, 6, 18)
    keep = result.plan.keep
    assert [int(half.sum()) for half in keep["a"].view(2, 8)] == [3, 3]
    assert [int(half.sum()) for half in keep["grouped"].view(2, 12)] == [9, 9]


@pytest.mark.parametrize(("groups", "outputs", "whole"), [(2, 14, False), (4, 12, True), (4, 16, False), (6, 24, True)])
def test_more_groups_than_channels_in_one_go_whole(groups, outputs, whole):
    """By the larger side: what one group reads, or what it makes."""
    within = {"a": (12, 12, groups), "grouped": (outputs, outputs, groups)}
    assert sizes(built(groups, 12, outputs)) == ({"a": (groups, groups, 1)} if whole else within)


def test_outputs_go_evenly_where_inputs_have_to_stay():
    model = nn.Sequential(nn.Conv2d(3, 12, 3, groups=3), nn.Tanh(), nn.Conv2d(12, 4, 1)).double().eval()
    assert sizes(model) == {"0": (12, 12, 3)}
    smaller = recoup.prune(model, [pictures()], widths={"0": 6}, method="fast").model
    assert (smaller[0].groups, smaller[0].in_channels, smaller[0].out_channels) == (3, 3, 6)


AGAIN = {"a": (16, 16, 2), "grouped": (64, 64, 4), "again": (64, 64, 4)}


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda m, h: m.again(h), AGAIN),  # two parts of 32, and four of 16
        (lambda m, h: m.again(F.channel_shuffle(h, 2)), AGAIN | {"grouped": (64, 64, 8)}),  # of 2 parts, 8 in each of 4
        (lambda m, h: m.again(torch.cat([h, h.tanh()], 1)[:, 32:96]), AGAIN),
        (lambda m, h: m.norms(h), {"a": (16, 16, 2), "grouped": (4, 4, 2)}),
        (lambda m, h: h * m.factors, {"a": (16, 16, 2), "grouped": (64, 64, 2)}),
    ],
)
def test_a_group_may_be_divided_in_several_ways(between, expected):
    extra = {"again": nn.Conv2d(64, 64, 1, groups=4), "norms": nn.GroupNorm(4, 64)}
    model = built(outputs=64, between=between, factors=nn.Parameter(torch.randn(64, 1, 1)), **extra)
    assert sizes(model) == expected
    result = recoup.prune(model, [pictures()], budget=recoup.Budget(width=0.5), method="fast")
    assert result.report.proof.difference < 1e-10
    assert all(row.after == row.before / 2 for row in result.report.groups if row.name in expected)


def test_what_divisions_that_do_not_fit_each_other_share_stays_and_the_rest_is_free():
    """Two parts of 36 and three of 24 have no common division into equal cells; whole parts would be one channel."""
    model = built(outputs=72, between=lambda m, h: m.again(h), again=nn.Conv2d(72, 72, 1, groups=3))
    assert sizes(model) == {"a": (16, 16, 2), "again": (72, 72, 3)}
    result = recoup.prune(model, [pictures()], widths={"a": 6, "again": 36}, method="fast")
    assert result.report.proof.difference < 1e-10


def test_whole_parts_go_where_more_can_go_so():
    """Two parts of 8 within the first of four of 16: parts can go but the first, which is all that `again` reads."""

    def between(m, h):
        return torch.cat([m.again(h[:, :16]), h[:, 16:]], 1)

    model = built(4, 16, 64, between, again=nn.Conv2d(16, 16, 1, groups=2))
    assert sizes(model) == {"a": (4, 3, 1), "again": (16, 16, 2)}


@pytest.mark.parametrize("keep_class", [None, False])
def test_what_all_parts_share_goes_as_if_there_were_none(keep_class):
    model = built(2, 16, 24)
    model.grouped = nn.Conv2d(32, 24, 3, padding=1, groups=2).double()
    model.norm = nn.Sequential(model.norm, Twice())
    assert sizes(model, keep_class=bool(keep_class)) == {"a": (16, 16, 1), "grouped": (24, 24, 2)}
    with torch.no_grad():
        for tensor in (model.a.weight, model.a.bias, *list(model.norm[0].state_dict().values())[:4]):
            tensor[8:] = tensor[:8]
    found = recoup.prune(model, [pictures()], widths={"a": 8}, method=EXACT, keep_class=keep_class)
    assert found.report.proof.difference < 1e-10
    assert (found.model.get_submodule("grouped").groups, found.plan.keep["a"].sum()) == (2, 8)
    torch.testing.assert_close(found.model(pictures(5)), model(pictures(5)), rtol=1e-6, atol=1e-6)


def test_a_weight_that_is_read_elsewhere_loses_whole_parts():
    def back(m, h):
        return F.conv_transpose2d(h, m.grouped.weight, padding=1, groups=2)

    assert sizes(built(2, 16, 16), untie=False) == {"a": (16, 16, 2), "grouped": (16, 16, 2)}
    assert sizes(built(2, 16, 16, back), untie=False) == {"a": (2, 2, 1)}


def test_a_refit_is_least_squares_within_every_part():
    model, x = built(), pictures()
    calibration = recoup.calibrate(recoup.trace(model, x), recoup.split(model, [x], held_out=False), EXACT)
    kept = torch.tensor([0, 2, 3, 5, 7, 8, 9, 10, 12, 13])
    plan = recoup.recover(calibration, {"a": torch.isin(torch.arange(16), kept)}).plan
    with torch.no_grad():
        inputs = torch.tanh(model.norm(model.a(x)))
        made = model.grouped(inputs).movedim(1, -1).flatten(0, 2)
        for part in range(2):
            own = nn.Conv2d(8, 12, 3, padding=1)
            some = kept[kept // 8 == part] % 8
            rows = unfolded(inputs[:, 8 * part : 8 * part + 8], own.double()).unflatten(1, (8, 9))[:, some].flatten(1)
            weight, bias = least_squares(rows, made[:, 12 * part : 12 * part + 12])
            found = plan.weights["grouped.weight"][12 * part : 12 * part + 12]
            torch.testing.assert_close(found[:, some].flatten(1).T, weight, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(plan.weights["grouped.bias"][12 * part :][:12], bias, rtol=1e-5, atol=1e-6)
            gone = [place for place in range(8) if place not in some]
            assert not bool(found[:, gone].any())
    assert plan.recovery["grouped"].inputs == 5 * 9


def test_no_method_loses_anything_where_every_part_holds_its_channels_twice():
    model, x = built(2, 32, 32), pictures(80)
    with torch.no_grad():
        for layer in (model.a, model.grouped):
            for tensor in (layer.weight, layer.bias):
                halves = tensor.unflatten(0, (2, 2, 8))
                halves[:, 1] = halves[:, 0]
    halves = model.norm.weight.data.unflatten(0, (2, 2, 8))
    halves[:, 1] = halves[:, 0]
    for method in (EXACT, recoup.Fast(ridge=1e-10), recoup.Best(ridge=1e-10)):
        smaller = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method=method).model
        assert (smaller.grouped.in_channels, smaller.grouped.out_channels) == (16, 16)
        with torch.no_grad():
            torch.testing.assert_close(smaller(x), model(x), rtol=1e-6, atol=1e-6)


class Sized(Block):
    """The same with a size in the code, which only a standalone form can change."""

    def forward(self, x):
        h = torch.tanh(self.norm(self.a(x)))
        return self.b(torch.tanh(self.grouped(h).view(len(x), 24, 36)).unflatten(2, (6, 6)))


@pytest.mark.parametrize("method", [EXACT, recoup.Fast()])
def test_a_layer_without_a_bias_gets_one_in_its_class_and_in_a_standalone_form(method):
    own = built()
    torch.manual_seed(0)
    sized = Sized().double().eval()
    own.grouped.bias = sized.grouped.bias = None
    results = [recoup.prune(m, [pictures()], widths={"a": 8, "grouped": 24}, method=method) for m in (own, sized)]
    assert [type(result.model) is Block for result in results] == [True, False]
    assert "grouped.bias" in results[0].plan.weights
    with torch.no_grad():
        torch.testing.assert_close(*(result.model(pictures(5)) for result in results))


def test_masks_and_widths_that_differ_between_parts_are_refused():
    model, x = built(), pictures()
    calibration = recoup.calibrate(recoup.trace(model, x), recoup.split(model, [x], held_out=False), EXACT)
    with pytest.raises(UsageError, match="keeps its 2 parts apart, and each must keep as many channels; .* keeps 3, 8"):
        recoup.recover(calibration, {"a": torch.arange(16) >= 5})
    with pytest.raises(UsageError, match="takes them from its 2 parts in turn; 8 would do"):
        recoup.prune(model, [x], widths={"a": 7}, method="fast")


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_saved_result_comes_back(kind, tmp_path):
    model = built()
    model.grouped = kind(16, 24, 3, padding=1, groups=2).double()
    result = recoup.prune(model, [pictures()], budget=recoup.Budget(width=0.5), method="fast")
    again = recoup.load(result.save(tmp_path / "out"), lambda: built_with(kind))
    assert (again.grouped.groups, again.grouped.in_channels, again.grouped.out_channels) == (2, 8, 12)
    assert torch.equal(again(pictures(3)), result.model(pictures(3)))


def built_with(kind):
    model = built()
    model.grouped = kind(16, 24, 3, padding=1, groups=2).double()
    return model


def best_balanced(layer, width, parts):
    """Backward elimination by solving from scratch; of every part in turn."""
    kept, order = list(range(width)), []
    while kept:
        turn = {int(parts[c]) for c in order[len(order) // 2 * 2 :]}
        open_to = [c for c in kept if int(parts[c]) not in turn]
        order.append(min(open_to, key=lambda c: loss(*layer, torch.tensor([k for k in kept if k != c]))))
        kept.remove(order[-1])
    return order[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_backward_elimination_takes_parts_in_turn_and_tells_the_loss_of_even_masks(seed):
    generator = torch.Generator().manual_seed(seed)
    mixing, weight = (torch.randn(n, m, dtype=torch.float64, generator=generator) for n, m in ((8, 8), (8, 5)))
    G, parts = mixing @ mixing.T, torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])
    problem = Problem(
        8, (Layer(G, weight, torch.arange(8)),), torch.ones(8, dtype=torch.bool), weight, 0.0, parts=parts
    )
    ranking = backward(problem)
    assert ranking.order.tolist() == best_balanced((G, weight), 8, parts)
    assert torch.equal(in_turn(ranking.order, parts), ranking.order)
    torch.testing.assert_close(ranking.loss, loss_along(problem, ranking.order))


def test_parts_take_turns_and_are_filled_up():
    parts = torch.tensor([0, 0, 0, 1, 1, 1, -1])
    assert in_turn(torch.tensor([6, 5, 4, 0, 3, 1, 2]), parts).tolist() == [6, 5, 0, 4, 1, 3, 2]
    keep = torch.tensor([True, True, False, False, False, True, False])
    filled = evened(keep, torch.arange(7).flip(0), parts)
    assert filled.tolist() == [True, True, False, False, True, True, False]


def test_a_grouped_weight_is_a_dense_one_with_zeros_between_parts():
    weight, x = torch.randn(6, 2, 3, 3), torch.randn(2, 4, 5, 5)
    dense = spread(weight, 2)
    torch.testing.assert_close(F.conv2d(x, dense), F.conv2d(x, weight, groups=2))
    torch.testing.assert_close(
        F.conv_transpose2d(x, spread(weight[:4], 2)), F.conv_transpose2d(x, weight[:4], groups=2)
    )
    assert torch.equal(gathered(dense, 2), weight)
