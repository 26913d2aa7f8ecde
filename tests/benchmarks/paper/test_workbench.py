"""What many cases share is what `prune` makes for each of them."""

import itertools
import time
from dataclasses import fields, replace

import pytest
import torch
from benchmarks.paper.cases import Case
from benchmarks.paper.command import parse
from benchmarks.paper.recoveries import HELD_OUT, recovered
from benchmarks.paper.training import trained
from benchmarks.paper.workbench import FastAccuracy, Sample, Subject, method_of, search

import recoup
from benchmarks.paper import fig6, smoke, workbench
from tests.benchmarks.test_best import bench, images
from tests.oracles import loss, rows_of


def options(*words):
    return parse(["table2", "--smoke", *words])


def subject():
    here = bench()
    splits = dict(here.splits)
    return Subject("net", here.model, lambda data, seed: images(seed), "own:60", splits, lambda: images(0), "CPU", True)


@pytest.mark.parametrize("method", ["paper", "released", "best"])
def test_a_search_is_what_prune_makes_within_the_tolerance(method):
    here = subject()
    case = Case("net", method, 2, 30.0)
    found = search(Sample(here, "", 2), case, options())
    whole = recoup.prune(
        here.model, images(2), validation=here.splits["validation"], tolerance=30.0,
        method=method_of(case, options()), keep_class=True,
    )  # fmt: skip
    assert found.removed == pytest.approx(100 * whole.report.macs_removed)
    assert found.kl == recoup.divergence(whole.model, here.model, here.splits["test"])
    assert found.validation_drop < 30.0 and found.evaluations == len(whole.report.score.trials)
    assert found.seconds == sum(found.stages.values()) and set(found.stages) >= {"statistics", "selection", "search"}
    widths = {
        group.name: 1 - group.after / group.before for group in whole.report.groups if group.name in found.sparsity
    }
    assert found.sparsity == pytest.approx(widths)


def test_statistics_and_rankings_are_made_once(monkeypatch):
    made = {"calibrate": 0, "rank": 0}
    for name in made:
        real = getattr(recoup, name)

        def counting(*args, _name=name, _real=real, **named):
            made[_name] += 1
            return _real(*args, **named)

        monkeypatch.setattr(workbench.recoup, name, counting)
    sample = Sample(subject(), "", 0)
    ways = itertools.product((10.0, 30.0), ("", "top-down"), ("l2", "random"))
    for case in [Case("net", tolerance=t, order=order, selector=name) for t, order, name in ways]:
        search(sample, case, options())
    assert made == {"calibrate": 1, "rank": 2}
    assert sample.ranked(recoup.Paper(selector="l2", order="random")).seen.method.order == "random"


def test_the_method_has_the_fields_of_the_case_and_of_the_command():
    case = Case("net", seed=3, order="top-down", selector="l2")
    given = options("--ridge", "0", "--positions", "0", "--weighting", "none")
    made = method_of(case, given)
    assert made == recoup.Paper(
        selector="l2", weighting="none", ridge=0.0, positions=None, order="top-down", unit="block", seed=3
    )
    assert method_of(Case("net", "released"), given).ridge == 0.0
    assert method_of(Case("net", "best", 1), options()) == recoup.Best(seed=1)
    assert {part.name for part in fields(made)} >= {"unit", "constraint"}


def test_the_fast_measure_agrees_with_the_slow_one():
    here = smoke.open_subject(smoke.STRIPED)
    for precision in ("bfloat16", "float16"):
        fast = FastAccuracy(here.splits["test"], precision)(here.model)
        assert fast == pytest.approx(here.base["test"], abs=0.5)
    assert here.base["test"] > 95


def test_losses_are_those_of_least_squares():
    sample = Sample(subject(), "", 0)
    ranked = sample.ranked(recoup.Paper(selector="l2", ridge=0.0))
    group = ranked.seen.structure.prunable[0]
    found = fig6.losses_of(ranked.seen, group, ranked.rankings[group.name])
    (layer,) = fig6.problem_of(ranked.seen, group).layers
    kept = ranked.rankings[group.name].order[: group.width // 2].tolist()
    nothing = loss(layer.covariance, layer.weight, torch.zeros(0).long())
    half = loss(layer.covariance, layer.weight, rows_of(layer.channel_of, kept)) / nothing
    assert found[fig6.SPARSITIES.index(0.5)] == pytest.approx(float(half), rel=1e-6)


def test_training_makes_a_better_copy():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = smoke.small_vgg().eval()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    made = trained(fresh, smoke.stripes(0), 6, rate=0.05)
    assert recoup.accuracy(made.model, smoke.stripes(1)) > 30 and made.seconds > 0
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())
    assert trained(fresh, smoke.stripes(0), 0).model is fresh


def test_calibration_images_are_drawn_from_their_source():
    own = smoke.stripes(0)
    assert sum(len(x) for x, _ in smoke.calibration(own, "own:250", 1)) == 250
    assert not torch.equal(smoke.calibration(own, "own:250", 1)[0][0], smoke.calibration(own, "own:250", 2)[0][0])
    (noise,) = smoke.calibration(own, "noise:200", 0)
    assert noise.shape == (200, 1, 8, 8) and abs(float(noise.std()) - 1) < 0.05


def test_tracing_is_a_stage_and_reading_images_is_none():
    reads = []
    here = subject()
    counted = replace(here, images=lambda data, seed: reads.append(seed) or time.sleep(0.3) or images(seed))
    _, clock = Sample(counted, "", 0).calibrated(recoup.Paper())
    assert reads == [0] and clock.seconds["trace"] == counted.trace_seconds > 0
    again = Sample(here, "", 0).calibrated(recoup.Paper())[1]
    assert clock.seconds["statistics"] < again.seconds["statistics"] + 0.3


def test_held_out_statistics_are_counted_beside_those_of_the_ranking():
    sample = Sample(subject(), "", 0)
    ranked = sample.ranked(recoup.Paper(selector="l2"))
    keep = recoup.allocate(ranked.seen, ranked.rankings, recoup.Goal(budget=recoup.Budget(width=0.5))).keep
    clock = ranked.clock
    recovered(sample, ranked, keep, "in-sequence", clock)
    assert clock.seconds[HELD_OUT] > 0 and {"trace", "statistics", "selection", "recovery"} <= set(clock.seconds)
    clock.forget("statistics")
    assert "statistics" not in clock.seconds
