import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import recoup
from recoup.channels.cost import cost
from recoup.channels.cost_model import macs_model, parameter_model
from tests.zoo import ZOO

NAMES = pytest.mark.parametrize("name", ZOO)


@functools.cache
def traced(name, width=6):
    entry = ZOO[name]
    model = entry.build(width)
    found = recoup.trace(model, entry.batch(2))
    return found.host, found.structure


def random_orders(structure, seed):
    """For every prunable group its locked channels, then the others in any order."""
    generator, orders = torch.Generator().manual_seed(seed), {}
    for group in structure.prunable:
        order = torch.randperm(group.width, generator=generator)
        orders[group.name] = torch.cat([order[group.locked[order]], order[~group.locked[order]]]) + group.start
    return orders


def random_counts(structure, seed):
    generator = torch.Generator().manual_seed(seed)
    return {g.name: int(torch.randint(0, g.width + 1, (1,), generator=generator)) for g in structure.prunable}


def keep_of(structure, orders, counts):
    keep = structure.keep_all()
    for group in structure.prunable:
        keep[group.channels] = False
        keep[orders[group.name][: counts[group.name]]] = True
    return keep


def both(structure, model, orders):
    return {"macs": macs_model(structure, orders), "parameters": parameter_model(structure, orders, model)}


@NAMES
@given(seed=st.integers(0, 9999))
@settings(max_examples=15, deadline=None)
def test_the_total_is_the_cost_of_the_mask(name, seed):
    model, structure = traced(name)
    orders, counts = random_orders(structure, seed), random_counts(structure, seed + 1)
    actual = cost(structure, model, keep_of(structure, orders, counts))
    for what, terms in both(structure, model, orders).items():
        assert terms.total(counts) == getattr(actual, what)


@NAMES
def test_along_a_group_the_cost_differs_by_what_depends_on_it(name):
    model, structure = traced(name)
    orders, counts = random_orders(structure, 1), random_counts(structure, 2)
    for what, terms in both(structure, model, orders).items():
        for group in structure.prunable:
            along = terms.along(group.name, counts)
            every = [{**counts, group.name: n} for n in range(group.width + 1)]
            actual = [getattr(cost(structure, model, keep_of(structure, orders, c)), what) for c in every]
            assert (along - along[0]).tolist() == [value - actual[0] for value in actual]
            assert [terms.total(c) for c in every] == actual


@NAMES
def test_at_full_width_it_is_the_whole_network(name):
    model, structure = traced(name)
    orders, counts = random_orders(structure, 3), {group.name: group.width for group in structure.prunable}
    whole = cost(structure, model)
    for what, terms in both(structure, model, orders).items():
        assert terms.total(counts) == getattr(whole, what)


def test_terms_of_a_known_network():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    structure = recoup.trace(model, torch.randn(1, 3, 8, 8)).structure
    terms = macs_model(structure, {"0": torch.arange(8)})
    assert terms.total({"0": 5}) == 64 * 9 * 3 * 5 + 16 * 9 * 5 * 4
    assert terms.along("0", {"0": 5}).tolist() == [(64 * 9 * 3 + 16 * 9 * 4) * n for n in range(9)]
    terms = parameter_model(structure, {"0": torch.arange(8)}, model)
    assert terms.total({"0": 5}) == 5 * 27 + 5 + 4 * 5 * 9 + 4
    assert terms.along("0", {"0": 5}).tolist() == [n * (27 + 1 + 36) for n in range(9)]


def test_a_layer_that_reads_its_own_outputs_grows_with_the_square():
    _, structure = traced("shared")
    (group,) = structure.prunable
    terms = macs_model(structure, {group.name: torch.arange(group.start, group.start + group.width)})
    twice = terms.along(group.name, {group.name: 1}).diff().diff()
    assert twice.tolist() == [2 * 2 * 64 * 9] * (group.width - 1)  # two calls, n² each


def test_a_channel_with_several_inputs_counts_them_all():
    model, structure = traced("flattened")
    (group,) = structure.prunable
    terms = parameter_model(structure, {group.name: torch.arange(group.width)}, model)
    assert terms.along(group.name, {group.name: 0}).diff().tolist() == [27 + 1 + 9 * 4] * group.width


def test_a_group_without_an_order_stays_whole():
    model, structure = traced("plain")
    first, second = structure.prunable
    orders = {first.name: torch.arange(first.start, first.start + first.width)}
    keep = structure.keep_all()
    keep[first.start + 2 : first.start + first.width] = False
    assert macs_model(structure, orders).total({first.name: 2}) == cost(structure, model, keep).macs
    assert set(macs_model(structure, orders).by_group) == {first.name}
    assert second.name not in macs_model(structure, orders).by_group


def test_parameters_outside_the_graph_are_counted():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.idle = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(7, 9)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.scale * self.b(torch.relu(self.a(x)))

    model = Idle()
    structure = recoup.trace(model, torch.randn(2, 5)).structure
    terms = parameter_model(structure, {"a": torch.arange(6)}, model)
    assert terms.total({"a": 2}) == 2 * 5 + 2 + 2 * 3 + 3 + 72 + 1
