"""Biases that a layer may not change, and those of layers whose parameters have names of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from tests.zoo import seeded

HALF = torch.arange(16) % 2 == 0
WHOLE = {"unit": "layer", "classifier": True}


class OwnNames(nn.Module):
    """A linear layer in the caller's own words."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 16)
        self.w, self.b = nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(8) * 2)

    def forward(self, x):
        return F.linear(self.a(x).relu(), self.w, self.b)


class SharedBias(nn.Module):
    """Two layers of different weights add one bias; the second reads nothing that can be pruned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(6, 8)
        self.c.bias = self.b.bias

    def forward(self, x):
        return self.b(self.a(x).relu()), self.c(x)


class ReadBias(nn.Module):
    """A bias that is a factor too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.b(self.a(x).relu()), x.sum(1, keepdim=True) * self.b.bias


def built(kind):
    with seeded(0):
        return kind().double().eval(), torch.randn(600, 6).double()


def error(model, plan, x):
    """Of the first output, relative to its spread."""
    smaller = recoup.apply(model, plan)
    expected, found = (part[0] if isinstance(part, tuple) else part for part in (model(x), smaller(x)))
    return float((expected - found).detach().norm() / (expected - expected.mean(0)).norm())


@pytest.mark.parametrize("kind", [OwnNames, SharedBias, ReadBias])
@pytest.mark.parametrize("recovery", ["in-sequence", "joint"])
def test_a_bias_is_counted_once_wherever_it_is_stored(kind, recovery):
    model, x = built(kind)
    seen = recoup.calibrate(recoup.trace(model, x), recoup.split(model, [x]), recoup.Fast(outputs="values"))
    with seeded(1):
        new = torch.randn(200, 6).double()
    cut, one, refitted = (
        error(model, recoup.recover(seen, {"a": HALF}, recovery=name).plan, new)
        for name in ("none", "one-pass", recovery)
    )
    assert one < cut
    assert refitted < 1.05 * one


def test_a_bias_of_any_name_takes_the_shift_of_its_layer():
    model, x = built(OwnNames)
    plan = recoup.prune(model, [x], widths={"a": 8}, method=recoup.Paper(weighting="none", **WHOLE)).plan
    assert plan.weights.keys() >= {"w", "b"}
    left = (recoup.apply(model, plan)(x) - model(x)).mean(0)
    assert left.abs().max() < 1e-10


@pytest.mark.parametrize("kind", [SharedBias, ReadBias])
@pytest.mark.parametrize("method", [recoup.Paper(weighting="none", **WHOLE), recoup.Fast(outputs="values")])
def test_what_reads_nothing_that_is_pruned_does_not_change(kind, method):
    model, x = built(kind)
    smaller = recoup.prune(model, [x], widths={"a": 8}, method=method).model
    torch.testing.assert_close(smaller(x)[1], model(x)[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [SharedBias, ReadBias])
@pytest.mark.parametrize("recovery", ["mean-shift", "one-pass", "in-sequence", "joint"])
def test_a_bias_that_others_read_stays_in_every_recovery(kind, recovery):
    model, x = built(kind)
    seen = recoup.calibrate(recoup.trace(model, x), recoup.split(model, [x]), recoup.Fast(outputs="values"))
    smaller = recoup.apply(model, recoup.recover(seen, {"a": HALF}, recovery=recovery).plan)
    torch.testing.assert_close(smaller(x)[1], model(x)[1], rtol=0, atol=0)
