import functools
import math
import re
import warnings
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import Budget, Recovered
from recoup.channels.cost import cost
from recoup.errors import BudgetError, CalibrationError, UsageError
from recoup.judge.output_error import Reference
from recoup.methods import measured as measured_methods
from recoup.methods import registry
from recoup.recovery import choose
from tests.recovery.bench import Fixed
from tests.timers import Ticking
from tests.zoo import conv_bn, seeded

MEASURED = pytest.mark.parametrize("method", ["best", "fast"])


def plain():
    pool = (nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(conv_bn(3, 12), conv_bn(12, 16, stride=2), conv_bn(16, 12), *pool, nn.Linear(48, 6))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 10)
        self.a = nn.Sequential(conv_bn(10, 14), conv_bn(14, 10, act=False))
        self.b = nn.Sequential(conv_bn(10, 12, stride=2), conv_bn(12, 12, act=False))
        self.skip, self.head = conv_bn(10, 12, kernel=1, stride=2, act=False), nn.Linear(12, 6)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.a(x))
        x = F.relu(self.skip(x) + self.b(x))
        return self.head(x.mean((2, 3)))


NETWORKS = {"plain": plain, "residual": Residual}
networks = pytest.mark.parametrize("network", NETWORKS)


@functools.cache
def network_and_images(network, samples=300):
    """Fresh weights, norms as after some training, and images that are noise."""
    with seeded(0):
        model, images = NETWORKS[network](), torch.randn(samples, 3, 8, 8)
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)
        with torch.no_grad():
            model.train()(images)
            head = list(model.modules())[-1]
            head.bias -= model.eval()(images).mean(0)  # every class is the answer to something
    return model, images


def labelled(model, images):
    """Batches with the model's own answers as labels, one in ten of them wrong."""
    with torch.no_grad():
        labels = model(images).argmax(1)
    labels[::10] = (labels[::10] + 1) % 6
    return [(images[:100], labels[:100]), (images[100:], labels[100:])]


def pruned(network, method="fast", **options):
    model, images = network_and_images(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return recoup.prune(model, list(images.split(64)), method=method, **options)


@functools.cache
def halved(network, method):
    return pruned(network, method, budget=Budget(macs=0.5))


@networks
@MEASURED
def test_a_budget_of_macs_is_met_and_not_by_much(network, method):
    report = halved(network, method).report
    assert 0.45 * report.before.macs < report.after.macs <= 0.5 * report.before.macs
    assert report.score is None


@networks
def test_a_budget_of_parameters_is_met(network):
    result = pruned(network, budget=Budget(parameters=0.5))
    whole = result.report.before.parameters
    added = sum(value.numel() for name, value in result.plan.weights.items() if name not in result.plan.shapes)
    assert 0.4 * whole < sum(p.numel() for p in result.model.parameters()) - added <= 0.5 * whole


@networks
def test_the_callers_model_is_unchanged(network):
    model, _ = network_and_images(network)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pruned(network, recoup.Best(refine=0.2), budget=Budget(macs=0.6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@networks
@MEASURED
def test_the_plan_is_the_recovery_that_errs_least_on_held_out_images(network, method):
    model, images = network_and_images(network)
    result = halved(network, method)
    data = recoup.split(model, list(images.split(64)))
    reference = Reference(recoup.trace(model, images).standalone.host, data.held_out())
    assert result.report.held_out.keys() == {"one pass", "in sequence"}
    assert reference.error(result.plan.weights) == pytest.approx(min(result.report.held_out.values()), rel=1e-4)


@networks
def test_measured_widths_and_recovery_in_sequence_err_less_than_the_published_way(network):
    """Much less along a residual stream; in a chain of two layers there is little to gain."""
    model, images = network_and_images(network)
    with seeded(1):
        fresh = [torch.randn(500, 3, 8, 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        published = recoup.prune(model, [images], budget=Budget(macs=0.5), method="paper")
    errors = [recoup.divergence(r.model, model, fresh) for r in (halved(network, "best"), published)]
    assert errors[0] < {"plain": 1.1, "residual": 0.95}[network] * errors[1]
    assert not published.report.held_out


@networks
def test_a_tolerance_on_labels_holds(network):
    model, images = network_and_images(network)
    batches = labelled(model, images)
    result = pruned(network, tolerance=40.0, validation=batches)
    score = result.report.score
    assert score.before == pytest.approx(recoup.accuracy(model, batches))
    assert score.after == pytest.approx(recoup.accuracy(result.model, batches), abs=0.5)
    assert score.drop < score.tolerance == 40.0
    assert any(trial.accepted for trial in score.trials)
    assert result.report.macs_removed > 0.02


@pytest.mark.parametrize(("enough", "measured"), [(15, {"budget": 60, "tolerance": 15}), (2000, {"tolerance": 60})])
def test_groups_are_measured_on_all_held_out_images_and_on_enough_for_a_tolerance(monkeypatch, enough, measured):
    model, images = network_and_images("plain")
    goals = {
        "budget": {"budget": Budget(macs=0.5)},
        "tolerance": {"tolerance": 40.0, "validation": labelled(model, images)},
    }
    asked, measure = [], measured_methods.measure_errors

    def spied(seen, rankings, widths, reference, *rest):
        asked.append(sum(batch.size for batch in reference._batches))
        return measure(seen, rankings, widths, reference, *rest)

    monkeypatch.setattr(measured_methods, "measure_errors", spied)
    monkeypatch.setattr(measured_methods, "ENOUGH_IMAGES", enough)
    for goal in measured:
        pruned("plain", **goals[goal])
    assert asked == list(measured.values())


def test_with_more_confidence_less_is_pruned():
    model, images = network_and_images("plain")
    shares = []
    for confidence in (None, 0.999):
        fast = recoup.Fast(confidence=confidence)
        shares.append(pruned("plain", fast, tolerance=10.0, validation=labelled(model, images)).report.macs_removed)
    assert shares[0] > shares[1]


@pytest.mark.parametrize(("network", "method"), [("plain", "best"), ("residual", "fast")])
def test_without_labels_a_tolerance_is_on_the_agreement_with_the_original(network, method):
    model, images = network_and_images(network)
    result = pruned(network, method, tolerance=40.0)
    score = result.report.score
    assert score.before == 100.0
    assert 60.0 < score.after <= 100.0
    data = recoup.split(model, list(images.split(64)))
    held = torch.cat([data.batches[place].args[0] for place in data.held])
    with torch.no_grad():
        same = (model(held).argmax(1) == result.model(held).argmax(1)).double().mean()
    assert score.after == pytest.approx(100 * float(same), abs=1.0)
    assert result.report.macs_removed > 0.05


def test_validation_without_labels_is_looked_at_in_their_place():
    model, _ = network_and_images("plain")
    with seeded(2):
        fresh = [torch.randn(200, 3, 8, 8)]
    result = pruned("plain", tolerance=40.0, validation=fresh)
    with torch.no_grad():
        same = (model(fresh[0]).argmax(1) == result.model(fresh[0]).argmax(1)).double().mean()
    assert result.report.score.before == 100.0
    assert result.report.score.after == pytest.approx(100 * float(same), abs=1.0)


def test_joint_refits_are_tried_on_a_bolder_share_first_and_on_larger_ones_where_they_fail():
    """The measure, the share of parameters in points, does not care how well a network is recovered."""
    whole = sum(parameter.numel() for parameter in network_and_images("plain")[0].parameters())
    result = pruned(
        "plain", "best", tolerance=30.0, evaluate=lambda m: 100 * sum(p.numel() for p in m.parameters()) / whole
    )
    trials = result.report.score.trials
    full = [trial for trial in trials if trial.groups == ("all groups, in full",)]
    assert full[0].drop > 1.2 * 30
    assert [trial.drop for trial in full] == sorted((trial.drop for trial in full), reverse=True) and len(full) > 1
    kept = result.report.after.macs / result.report.before.macs
    assert kept == pytest.approx(min(trial.share for trial in trials if trial.accepted), abs=0.02)


def test_the_quick_plan_stays_where_none_in_full_passes(monkeypatch):
    full = measured_methods.recover_in_full

    def ruined(seen, keep, progress):
        recovered = full(seen, keep, progress)
        zeros = {name: torch.zeros_like(value) for name, value in recovered.plan.weights.items()}
        return Recovered(replace(recovered.plan, weights=zeros), recovered.errors)

    monkeypatch.setattr(measured_methods, "recover_in_full", ruined)
    model, images = network_and_images("plain")
    batches = labelled(model, images)
    result = pruned("plain", "best", tolerance=40.0, validation=batches)
    assert result.report.macs_removed > 0
    assert not any(trial.accepted for trial in result.report.score.trials if "in full" in trial.groups[0])
    assert result.report.score.after == pytest.approx(recoup.accuracy(result.model, batches), abs=0.5)
    assert recoup.accuracy(result.model, batches) > result.report.score.before - 40.0


def test_a_measure_of_ones_own_decides():
    """Points are channels of the first layer: one may go for every point."""
    calls = []

    def channels(model):
        calls.append(model)
        return float(model[0][0].out_channels)

    result = pruned("plain", tolerance=5.0, evaluate=channels)
    first = result.model[0][0].out_channels
    assert 12 - first < 5.0
    assert result.report.score.before == 12.0
    assert result.report.score.after == first
    assert calls[0] is network_and_images("plain")[0]


def test_a_measure_is_reported_with_a_budget_too():
    model, images = network_and_images("plain")
    batches = labelled(model, images)
    score = pruned("plain", budget=Budget(macs=0.6), validation=batches).report.score
    assert score.before == pytest.approx(recoup.accuracy(model, batches))
    assert (score.tolerance, score.trials) == (None, ())
    score = pruned("plain", budget=Budget(macs=0.6), evaluate=lambda m: 7.0).report.score
    assert (score.before, score.after) == (7.0, 7.0)


def test_refinement_goes_on_until_its_time_is_over_and_does_not_hurt(monkeypatch):
    clock = Ticking(0.02)
    monkeypatch.setattr("recoup.recovery.refine.time", clock)
    model, images = network_and_images("residual")
    result = pruned("residual", recoup.Fast(refine=2.0), budget=Budget(macs=0.5))
    assert 2.0 < clock.now < 2.1
    errors = result.report.held_out
    assert errors.keys() == {"one pass", "in sequence", "refined"}
    data = recoup.split(model, list(images.split(64)))
    reference = Reference(recoup.trace(model, images).standalone.host, data.held_out())
    assert reference.error(result.plan.weights) == pytest.approx(min(errors.values()), rel=1e-4)
    assert result.report.after.macs <= 0.5 * result.report.before.macs


def test_after_refinement_a_tolerance_is_measured_again():
    model, images = network_and_images("plain")
    batches = labelled(model, images)
    result = pruned("plain", recoup.Fast(refine=0.5), tolerance=40.0, validation=batches)
    assert result.report.macs_removed > 0
    assert result.report.score.after == pytest.approx(recoup.accuracy(result.model, batches), abs=0.5)
    assert result.report.score.trials


def test_a_refinement_beyond_the_tolerance_is_left_out(monkeypatch):
    """The refined network is one that nobody would want."""
    model, images = network_and_images("plain")
    batches = labelled(model, images)

    def ruined(seen, recovered, keep, progress):
        zeros = {name: torch.zeros_like(value) for name, value in recovered.plan.weights.items()}
        return Recovered(replace(recovered.plan, weights=zeros), {**recovered.errors, "refined": 0.0})

    monkeypatch.setattr(measured_methods, "refined", ruined)
    with pytest.warns(recoup.RecoupWarning, match="refinement is left out"):
        result = recoup.prune(
            model, list(images.split(64)), method=recoup.Fast(refine=0.1), tolerance=40.0, validation=batches
        )
    assert result.report.score.drop < 40.0 and result.report.macs_removed > 0
    assert "refined" not in result.report.held_out


@MEASURED
def test_a_tolerance_that_so_few_images_cannot_vouch_for_is_refused_before_the_work(method):
    model, images = network_and_images("plain")
    told = []
    with pytest.raises(CalibrationError, match=r"300 images cannot tell .* Give at least 542 validation images"):
        batches = labelled(model, images)
        pruned("plain", method, tolerance=0.5, validation=batches, progress=lambda *step: told.append(step))
    assert not told
    with pytest.raises(CalibrationError, match=r"\d+ images cannot tell with 95% confidence"):
        pruned("plain", method, tolerance=0.5)


@pytest.mark.parametrize("method", ["best", "paper"])
def test_what_cannot_be_measured_is_refused_before_the_work(method):
    told, images = [], network_and_images("plain")[1]
    with pytest.raises(CalibrationError, match="labels must be"):
        wrong = [(images, torch.zeros(len(images), 6))]
        pruned("plain", method, budget=Budget(macs=0.5), validation=wrong, progress=lambda *step: told.append(step))
    assert not told


@pytest.mark.parametrize("method", ["fast", "paper"])
def test_a_budget_with_images_without_labels_reports_agreement(method):
    model, images = network_and_images("plain")
    result = pruned("plain", method, budget=Budget(macs=0.6), validation=[images])
    with torch.no_grad():
        same = (result.model(images).argmax(1) == model(images).argmax(1)).double().mean()
    assert result.report.score.what == "agreement"
    assert (result.report.score.before, result.report.score.after) == (100.0, pytest.approx(100 * float(same)))


def test_a_tolerance_without_labels_is_refused_by_the_published_search():
    images = network_and_images("plain")[1]
    with pytest.raises(CalibrationError, match="carry no labels"):
        pruned("plain", "paper", tolerance=5.0, validation=[images])


class AskedError(Exception):
    """Nothing more is wanted to be known."""


@pytest.mark.parametrize(
    ("validated", "outputs", "expected"),
    [(None, "auto", False), ("images", "auto", False), ("labelled", "auto", True), (None, "classes", True)],
)
def test_where_accuracy_is_measured_the_outputs_are_class_scores(monkeypatch, validated, outputs, expected):
    model, images = network_and_images("plain")
    given = {"images": [images], "labelled": labelled(model, images), None: None}

    monkeypatch.setattr(choose, "makes_classes", lambda *_: False)

    def ask(seen, *_):
        assert (choose._scoring_head(seen) is not None) == expected
        raise AskedError

    monkeypatch.setattr(registry.Fast, "allocate", lambda self, seen, *_: ask(seen))
    with pytest.raises(AskedError):
        recoup.prune(
            model, given["labelled"], validation=given[validated], budget=Budget(macs=0.5),
            method=recoup.Fast(outputs=outputs),
        )  # fmt: skip


def test_that_nothing_was_pruned_is_said():
    model, images = network_and_images("plain")

    def never(candidate):
        return 90.0 if candidate is model else 0.0

    with pytest.warns(recoup.RecoupWarning, match="nothing was pruned"):
        result = recoup.prune(model, list(images.split(64)), method="fast", tolerance=0.5, evaluate=never)
    assert result.report.macs_removed == 0.0


def test_every_calibration_image_is_counted():
    assert halved("plain", "fast").report.samples == 300


def test_a_width_is_the_same_share_of_every_group():
    result = pruned("residual", budget=Budget(width=0.5))
    for row in result.report.groups:
        assert row.after == row.before or row.after == math.ceil(0.5 * row.before)
    assert "in sequence" in result.report.held_out


def test_a_budget_out_of_reach_is_refused():
    with pytest.raises(BudgetError, match=r"keeping 0.1% of the macs is out of reach"):
        pruned("plain", budget=Budget(macs=0.001))


def test_too_few_images_are_refused():
    model, images = network_and_images("plain")
    with pytest.raises(CalibrationError, match="4 calibration images are too few"):
        recoup.prune(model, [images[:4]], budget=Budget(macs=0.5))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (recoup.Best, "order"),
        (recoup.Best, "joint_steps"),
        (recoup.Fast, "steps"),
        (recoup.Paper, "refine"),
        (recoup.Paper, "confidence"),
        (recoup.Released, "weighting"),
    ],
)
def test_a_field_that_a_method_does_not_have_cannot_be_passed(kind, field):
    with pytest.raises(TypeError, match=field):
        kind(**{field: 1})


def test_fast_has_the_fields_of_best_and_released_those_of_paper_but_one():
    names = {
        kind: [field.name for field in fields(kind)] for kind in map(type, map(registry.find_method, registry.METHODS))
    }
    assert names[recoup.Fast] == names[recoup.Best]
    assert [*names[recoup.Released], "weighting"] == [name for name in names[recoup.Paper] if name != "weighting"] + [
        "weighting"
    ]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: recoup.Best(confidence=0.2), "confidence must be None or lie from 0.5 to below 1, got 0.2"),
        (lambda: recoup.Best(outputs="logits"), "unknown outputs 'logits'; there are auto, classes, values"),
        (lambda: recoup.Fast(multiple_of=0), "multiple_of must be a whole number of at least 1, got 0"),
        (lambda: recoup.Best(selector="nearest"), "unknown selector 'nearest'"),
        (lambda: recoup.Paper(order="sideways"), "unknown order 'sideways'; there are bottom-up, top-down, random"),
        (lambda: recoup.Paper(steps=0), "steps must be a whole number of at least 1, got 0"),
        (lambda: recoup.Paper(weighting="steep"), "unknown weighting 'steep'"),
        (lambda: recoup.Released(ridge=-1.0), "ridge must be a number of at least 0, got -1.0"),
        (lambda: recoup.Released(positions=0), "positions must be a whole number of at least 1, got 0"),
        (
            lambda: registry.find_method("beste"),
            "unknown method 'beste'; there are best, fast, paper, released. Did you mean 'best'",
        ),
        (lambda: registry.find_method(recoup.Best), "method must be a name or a value such as recoup.Best()"),
    ],
)
def test_fields_that_make_no_sense_are_refused(make, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        make()


def test_a_graph_that_serves_one_batch_size_only_is_pruned_the_published_way():
    with seeded(0):
        model, images = Fixed().eval(), torch.randn(40, 3, 8, 8)
    with pytest.warns(recoup.RecoupWarning, match="the paper's method is used: widths are not measured, layers are"):
        result = recoup.prune(model, [images], budget=Budget(macs=0.5), method=recoup.Best(multiple_of=2, seed=3))
    assert not result.report.held_out
    assert result.report.after.macs <= 0.5 * result.report.before.macs
    said = result.report.method
    assert (said["name"], said["multiple_of"], said["seed"], said["selector"]) == ("Paper", 2, 3, "backward")


def test_the_result_costs_what_the_structure_says():
    model, images = network_and_images("residual")
    result = halved("residual", "best")
    structure = recoup.trace(model, images).structure
    mask = torch.cat([result.plan.keep[group.name] for group in structure.groups])
    assert cost(structure, model, mask).macs == result.report.after.macs


def test_progress_is_told_of_every_stage():
    stages = []
    pruned("plain", recoup.Best(refine=0.2), tolerance=40.0, progress=lambda stage, *_: stages.append(stage))
    expected = ["calibrate", "rank", "measure groups", "search", "recover", "refine"]
    assert [stage for stage in dict.fromkeys(stages) if stage in expected] == expected
