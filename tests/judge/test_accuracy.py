import pytest
import torch
from torch import nn

import recoup
from recoup.judge.accuracy import accuracy, divergence
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.recovery.plans import keep_mask
from tests.zoo import ZOO


class Echo(nn.Module):
    """Scores are the inputs themselves."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def test_accuracy_counts_hits_over_batches_of_unequal_size():
    x = torch.eye(4)
    batches = [(x, torch.tensor([0, 1, 2, 0])), (x[:1], torch.tensor([0]))]
    assert accuracy(Echo(), batches) == 80.0


def test_divergence_is_that_of_the_definition():
    x = torch.randn(6, 4)
    sharper = Echo()
    sharper.scale.data.fill_(2.0)
    p, q = x.double().softmax(1), (2 * x).double().softmax(1)
    expected = (p * (p / q).log()).sum(1).mean()
    assert divergence(sharper, Echo(), [x[:4], x[4:]]) == pytest.approx(float(expected), rel=1e-6)
    assert divergence(Echo(), Echo(), [x]) == 0


def test_measuring_leaves_the_training_flags_alone():
    model = ZOO["plain"].build(4).train()
    model[0].eval()
    before = [module.training for module in model.modules()]
    accuracy(model, [(ZOO["plain"].batch(5), torch.arange(5) % 4)])
    assert [module.training for module in model.modules()] == before


def test_a_tolerance_is_kept_on_the_validation_set():
    entry = ZOO["plain"]
    model = entry.build(12)
    x = entry.batch(300)
    with torch.no_grad():
        labels = model(x).argmax(1)
    result = recoup.prune(model, [x], validation=[(x, labels)], tolerance=10.0)
    score = result.report.score
    assert score.before == 100.0
    assert score.drop < 10.0
    assert accuracy(result.model, [(x, labels)]) == pytest.approx(score.after)
    assert result.report.macs_removed > 0.1


def test_a_budget_with_validation_is_measured_too():
    entry = ZOO["plain"]
    x = entry.batch(50)
    result = recoup.prune(entry.build(8), [x], validation=[(x, torch.arange(50) % 4)], budget=recoup.Budget(macs=0.5))
    assert result.report.score.tolerance is None
    assert "\naccuracy " in str(result.report)
    assert "points" in str(result.report)


def test_the_methods_differ_in_what_they_do():
    entry = ZOO["plain"]
    model, x = entry.build(8), entry.batch(60)
    paper, released = (
        recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method=name) for name in ("paper", "released")
    )
    assert not torch.equal(paper.model[0][2][0].weight, released.model[0][2][0].weight)
    assert [result.report.method["name"] for result in (paper, released)] == ["Paper", "Released"]
    traced = recoup.trace(model, x)
    seen = recoup.calibrate(traced, recoup.split(model, [x], held_out=False), recoup.Released())
    keep = keep_mask(seen.structure, released.plan.keep)
    rescaled = recover_in_one_pass(seen, keep, rescale=True).weights
    assert all(torch.equal(weight, rescaled[name]) for name, weight in released.plan.weights.items())


def test_inspect_prints_groups_and_reasons():
    entry = ZOO["unknown"]
    seen = recoup.inspect(entry.build(6), entry.batch(2))
    assert seen.prunable == 1
    text = str(seen)
    assert "1 of 3 groups prunable" in text
    assert "the model returns it" in text
    assert seen.to_json()["cost"]["macs"] == seen.cost.macs
    assert seen.groups[0].macs == 64 * 27 * 6
