import functools

import pytest
import torch

from recoup.judging.harm import Reference
from recoup.variants import ONCE, REFINED, SEQUENCE, Chosen, Recoverer
from tests.sequence.bench import zoo_bench


@functools.cache
def prepared(name, **settings):
    """What is there to recover, and who does it."""
    found = zoo_bench(name, width=8, samples=100, seed=5, **settings)
    reference = Reference(found.host, found.sample.judging())
    return found, reference, Recoverer(found.calibration, found.sample, reference)


@pytest.mark.parametrize("name", ["plain", "residual", "perceptron", "several", "fixed"])
@pytest.mark.parametrize("quick", [True, False])
def test_the_plan_is_the_variant_that_harms_least(name, quick):
    found, reference, recoverer = prepared(name, joint=1)
    chosen = recoverer.plan(found.keep, quick=quick)
    assert chosen.harms.keys() == {ONCE, SEQUENCE}
    assert reference.harm(chosen.plan.weights) == min(chosen.harms.values())
    assert chosen.harms[ONCE] == pytest.approx(reference.harm(found.start.weights))


def test_one_pass_is_all_where_no_more_was_asked_for():
    found, _, recoverer = prepared("plain", recovery="once")
    chosen = recoverer.plan(found.keep)
    assert chosen.harms.keys() == {ONCE}
    assert all(torch.equal(value, chosen.plan.weights[name]) for name, value in found.start.weights.items())


def test_where_nothing_is_pruned_there_is_nothing_to_try():
    found, _, recoverer = prepared("plain", joint=1)
    chosen = recoverer.plan(torch.ones_like(found.keep))
    assert chosen.harms == {ONCE: 0.0}
    assert not chosen.plan.weights


def test_a_quick_plan_refits_no_layers_jointly():
    """Without joint refits the filters of what is pruned stay those of the original."""
    found, _, recoverer = prepared("plain", joint=2)
    quick = recoverer.plan(found.keep, quick=True).plan
    thorough = recoverer.plan(found.keep).plan
    assert "0.0.0.weight" not in quick.weights
    assert "0.0.0.weight" in thorough.weights


def test_refinement_is_one_more_variant():
    found, reference, recoverer = prepared("perceptron", joint=1)
    before = recoverer.plan(found.keep, quick=True)
    after = recoverer.refined(before, found.keep, 0.5)
    assert after.harms.keys() == {ONCE, SEQUENCE, REFINED}
    assert {name: after.harms[name] for name in before.harms} == before.harms
    assert reference.harm(after.plan.weights) == min(after.harms.values())


def test_a_refinement_that_does_not_help_is_dropped():
    """A plan that already is as good as can be."""
    found, _, recoverer = prepared("plain", joint=1)
    best = recoverer.plan(found.keep)
    perfect = Chosen(best.plan, {**best.harms, SEQUENCE: 0.0})
    assert recoverer.refined(perfect, found.keep, 0.1).plan is best.plan
