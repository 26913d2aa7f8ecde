import functools

import pytest
import torch
from torch import nn

import recoup
from recoup.allocation.timing import network_seconds, operation_timings
from recoup.channels.cost_model import Timing, channels_in, latency_model, macs_model
from recoup.inputs.batches import Inputs
from recoup.labels.layout import Layout
from recoup.surgery.apply import apply
from recoup.tracing.trace import plain_cut
from tests.channels.test_cost_model import keep_of, random_counts, random_orders
from tests.timers import Work
from tests.zoo import ZOO

NAMES = pytest.mark.parametrize("name", ZOO)
WORK = Work(layer=500.0, element=7.0)


def inputs_for(batch):
    return Inputs(batch if isinstance(batch, tuple) else (batch,), {})


@functools.cache
def timed(name, timer, width=6):
    entry = ZOO[name]
    model, batch = entry.build(width), inputs_for(entry.batch(2))
    traced = recoup.trace(model, batch)
    return model, traced, batch, operation_timings(traced.standalone.host, traced.structure, batch, timer)


def terms_of(traced, orders, timings):
    return latency_model(traced.structure, orders, timings, traced.standalone.layouts)


def all_channels(structure):
    return {group.name: group.width for group in structure.prunable}


@NAMES
def test_at_full_width_it_is_what_was_measured(name):
    generator = iter(range(1, 1000))
    _, traced, _, timings = timed(name, lambda run, device: (run(), 1e-6 * next(generator))[1])
    orders = random_orders(traced.structure, 1)
    total = terms_of(traced, orders, timings).total(all_channels(traced.structure))
    assert total == pytest.approx(sum(timing.seconds for timing in timings.values()))


MACS = Work()


@NAMES
@pytest.mark.parametrize("seed", range(3))
def test_where_seconds_are_macs_so_are_the_terms(name, seed):
    """Layers are halved as they have to be, whatever their form: nothing is left that would not scale."""
    _, traced, batch, timings = timed(name, MACS)
    orders, counts = random_orders(traced.structure, seed), random_counts(traced.structure, seed + 1)
    seconds, macs = terms_of(traced, orders, timings), macs_model(traced.structure, orders)
    assert seconds.total(counts) == pytest.approx(batch.size * macs.total(counts))
    for name in orders:
        along = seconds.along(name, counts).diff()
        torch.testing.assert_close(along, batch.size * macs.along(name, counts).diff())


EXACT = ["plain", "flattened", "residual", "shared", "windows", "one-dim", "three-dim", "perceptron", "several"]


@pytest.mark.parametrize("name", [*EXACT, "scaled", "fixed"])
@pytest.mark.parametrize("seed", range(3))
def test_predicted_seconds_are_those_of_the_smaller_network(name, seed):
    model, traced, batch, timings = timed(name, WORK)
    orders = random_orders(traced.structure, seed)
    counts = {name: max(1, count) for name, count in random_counts(traced.structure, seed + 1).items()}
    keep = keep_of(traced.structure, orders, counts)
    smaller = apply(model, plain_cut(traced, keep))
    (seconds,) = network_seconds([smaller], batch, WORK)
    assert terms_of(traced, orders, timings).total(counts) == pytest.approx(seconds)


def test_terms_of_a_known_network():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    traced = recoup.trace(model.eval(), torch.randn(1, 3, 8, 8))
    first, last = (product.node for product in traced.structure.products)
    (activation,) = (name for name in traced.standalone.layouts if "relu" in name)
    timings = {first: Timing(1.0, 24.0), activation: Timing(0.0, 16.0, (first,)), last: Timing(2.0, 32.0)}
    terms = terms_of(traced, {"0": torch.arange(8)}, timings)
    assert terms.total({"0": 5}) == pytest.approx(3.0 + 15.0 + 10.0 + 20.0)
    assert terms.along("0", {"0": 5}).tolist() == pytest.approx([(3.0 + 2.0 + 4.0) * n for n in range(9)])
    assert [len(term.sides) for term in terms.every] == [0, 2, 1, 2]


def test_an_operation_that_only_reads_channels_grows_with_them_and_others_with_none():
    structure = recoup.trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4)), torch.randn(1, 3)).structure
    layouts = {"read": Layout((1, 8), 1, torch.arange(8)), "made": Layout((1, 5), None, None), "size": None}
    timings = {"made": Timing(0.0, 8.0, ("size", "read")), "other": Timing(0.0, 5.0, ("made",))}
    terms = latency_model(structure, {"0": torch.arange(8)}, timings, layouts)
    assert terms.total({"0": 3}) == pytest.approx(3.0 + 5.0)


def test_channels_that_have_to_stay_are_paid_for_in_any_case():
    structure = recoup.trace(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4)), torch.randn(1, 3)).structure
    layouts = {"made": Layout((1, 10), 1, torch.tensor([-1, -1, *range(8)]))}
    terms = latency_model(structure, {"0": torch.arange(8)}, {"made": Timing(0.0, 10.0)}, layouts)
    assert [terms.total({"0": n}) for n in (0, 3, 8)] == pytest.approx([2.0, 5.0, 10.0])


def test_parts_of_a_split_hold_the_channels_of_all():
    class Splits(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            left, right = self.a(x).chunk(2, dim=1)
            return self.b(left * right)

    traced = recoup.trace(Splits().eval(), torch.randn(1, 3, 8, 8))
    (name,) = (n for n in traced.standalone.layouts if n.startswith(("chunk", "split")))
    (group,) = traced.structure.prunable
    order = {group.name: torch.arange(group.start, group.start + group.width)}
    assert len(channels_in(traced.standalone.layouts[name])) == 8
    terms = terms_of(traced, order, {name: Timing(0.0, 8.0)})
    assert terms.total({group.name: 1}) == pytest.approx(8.0 / group.width)
