import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from recoup.judging.harm import Reference
from recoup.sequence import recover_in_sequence
from recoup.variants import ONCE, REFINED, SEQUENCE, Chosen, Recoverer, head_of, makes_classes
from tests.sequence.bench import Written, bench, zoo_bench
from tests.zoo import seeded


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


def test_what_cannot_be_refined_says_so_and_stays():
    with seeded(0):
        found = bench(Written().double().eval(), torch.randn(60, 3, 8, 8).double(), {"a": torch.arange(8) < 4})
    recoverer = Recoverer(found.calibration, found.sample, Reference(found.host, found.sample.judging()))
    before = recoverer.plan(found.keep, quick=True)
    with pytest.warns(UserWarning, match="nothing was refined"):
        assert recoverer.refined(before, found.keep, 5.0) is before


def classifier(tied=False, are_classes=True):
    """Scores from rows that cancel out, as cross-entropy leaves them, or, larger, values from rows that do not."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 6)
            self.tied = tied

        def forward(self, x):
            x = x + self.c.bias if self.tied else x
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    with seeded(0):
        model = Net().double().eval()
        weight = model.c.weight.data
        weight.copy_(6 * (weight - weight.mean(dim=0)) if are_classes else 300 * weight)
        return bench(model, torch.randn(300, 6).double(), {"a": torch.arange(12) < 4})


def test_class_scores_get_the_scale_that_harms_least():
    found = classifier()
    reference = Reference(found.host, found.sample.judging())
    recoverer = Recoverer(found.calibration, found.sample, reference)
    plan = recoverer.plan(found.keep).plan
    assert reference.gain(plan.weights) == pytest.approx(1.0, abs=1e-3)
    plain = recover_in_sequence(found.calibration, found.sample, found.keep, found.start)
    ratio = plan.weights["c.weight"] / plain.weights["c.weight"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, reference.gain(plain.weights)))
    assert float(ratio.mean()) != pytest.approx(1.0, abs=1e-3)
    torch.testing.assert_close(plan.weights["b.weight"], plain.weights["b.weight"])


@pytest.mark.parametrize("are_classes", [False, True])
def test_values_that_have_the_shape_of_class_scores_are_scaled_only_if_known_to_be_some(are_classes):
    """Where values are large the divergence would have them nearer to zero, whatever becomes of them."""
    found = classifier(are_classes=False)
    reference = Reference(found.host, found.sample.judging())
    recoverer = Recoverer(found.calibration, found.sample, reference, are_classes=are_classes)
    scaled = recoverer.plan(found.keep).plan
    plain = recover_in_sequence(found.calibration, found.sample, found.keep, found.start)
    assert reference.gain(plain.weights) < 0.9
    assert torch.equal(scaled.weights["c.weight"], plain.weights["c.weight"]) != are_classes


@pytest.mark.parametrize("input_dim", [0, 1])
def test_class_scores_are_known_by_rows_that_cancel_out(input_dim):
    found = classifier()
    head = replace(head_of(found.calibration), input_dim=input_dim)
    weight = found.calibration.parameters["c.weight"]
    turned = replace(found.calibration, parameters={"c.weight": weight if input_dim == 1 else weight.T})
    assert makes_classes(turned, head)
    assert not makes_classes(turned, replace(head, input_dim=1 - input_dim))
    assert not makes_classes(classifier(are_classes=False).calibration, replace(head, input_dim=1))


def test_the_head_makes_all_that_is_returned_and_is_used_for_nothing_else():
    assert head_of(classifier().calibration).name == "c"
    assert head_of(classifier(tied=True).calibration) is None
    assert head_of(zoo_bench("several").calibration) is None
