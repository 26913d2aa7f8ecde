import pytest
import torch
from torch import nn

import recoup
from recoup.errors import CalibrationError, UsageError
from recoup.judge.accuracy import accuracies, accuracy, divergence
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


def in_the_first(scores, labels, top):
    """Percentage of labels among the `top` largest scores, one sample at a time; of equal ones the first."""
    hits = 0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        hits += label in sorted(range(len(row)), key=lambda place: -row[place])[:top]
    return 100 * hits / len(labels)


@pytest.mark.parametrize("top", [1, 2, 5, 11, 12])
def test_a_label_among_the_largest_outputs_counts(top):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (97, 12), generator=generator).float()  # with many equal outputs
    labels = torch.randint(0, 12, (97,), generator=generator)
    batches = [(scores[:50], labels[:50]), (scores[50:], labels[50:])]
    assert accuracy(Echo(), batches, top=top) == pytest.approx(in_the_first(scores, labels, top))
    if top in (1, 5):
        assert accuracies(Echo(), batches)[top // 5] == pytest.approx(in_the_first(scores, labels, top))


def test_an_output_that_is_no_number_comes_before_all_others():
    """As in `argmax` and `topk`."""
    scores = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, 5.0, 1.0]])
    labels = torch.tensor([2, 2])
    assert accuracy(Echo(), [(scores, labels)], top=2) == 50.0
    assert scores.topk(2).indices.tolist() == [[1, 2], [0, 1]]


def test_more_places_than_classes_are_refused():
    batches = [(torch.eye(4), torch.arange(4))]
    assert accuracy(Echo(), batches, top=4) == 100.0
    with pytest.raises(
        UsageError, match=r"top=5: Echo has 4 classes, so that every label would be right\. Ask for fewer"
    ):
        accuracy(Echo(), batches, top=5)
    for wrong in (0, -1, 2.0, True, "5"):
        with pytest.raises(UsageError, match="top"):
            accuracy(Echo(), batches, top=wrong)
    with pytest.raises(CalibrationError, match="no labels"):
        accuracy(Echo(), [torch.eye(4)], top=2)


def wide(classes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, classes)).eval()
    x, labels = torch.randn(200, 8), torch.randint(0, classes, (200,))
    return model, x, [(x, labels)]


@pytest.mark.filterwarnings("ignore:.*chance")
@pytest.mark.parametrize("goal", [{"budget": recoup.Budget(width=0.5)}, {"tolerance": 30.0}], ids=str)
def test_a_report_tells_top5_of_both_networks(goal):
    model, x, validation = wide(20)
    report = (result := recoup.prune(model, [x], validation=validation, method="fast", **goal)).report
    assert report.score.top5_before == accuracy(model, validation, top=5)
    assert report.score.top5_after == accuracy(result.model, validation, top=5)
    assert report.score.top5_before > report.score.before
    assert report.flops_removed > 0
    said = f"top-5 accuracy {report.score.top5_before:.2f} -> {report.score.top5_after:.2f}"
    assert said in str(report)


@pytest.mark.filterwarnings("ignore:.*chance")
def test_top5_is_left_out_of_few_classes_and_where_there_are_no_labels():
    half = recoup.Budget(width=0.5)
    for classes, is_labelled in ((10, True), (11, True), (11, False)):
        model, x, validation = wide(classes)
        given = validation if is_labelled else [x]
        score = recoup.prune(
            model, [x], validation=given, budget=half, method=recoup.Paper(classifier=True)
        ).report.score
        assert (score.top5_before is None) == (score.top5_after is None) == (classes == 10 or not is_labelled)
    score = recoup.prune(
        model, [x], evaluate=lambda _: 50.0, budget=half, method=recoup.Paper(classifier=True)
    ).report.score
    assert score.what == "score" and score.top5_before is None is score.top5_after
