"""Assertions on meaning: each fails where its meaning is lost, and says what."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
from benchmarks.paper.cases import Case
from benchmarks.paper.checks import require_rows

from benchmarks.paper import fig4, fig5, fig6, fig7, retraining, table1, table2, table3, table4, weighting
from tests.benchmarks.paper.rows import STAMP, failed, row

VGG = Case("vgg16", tolerance=0.5)


def expect(experiment, rows, message):
    with pytest.raises(AssertionError, match=message):
        experiment.check(rows)


def test_a_tolerance_that_is_exceeded():
    table2.check([row(VGG, validation_drop=0.49)])
    expect(table2, [row(VGG, validation_drop=0.5)], "lost 0.50 points on the validation images")
    table2.check([row(VGG, validation_drop=0.7, stamp=replace(STAMP, evaluate="float16"))])


def test_a_tolerance_that_brings_nothing():
    more = replace(VGG, tolerance=2.0)
    expect(table2, [row(VGG), row(more, removed=40.0)], "40.0 % go at tolerance 2.0, no more than 50.0 % at 0.5")


def test_more_measurements_than_blocks_allow():
    table1.check([row(VGG, evaluations=48), row(replace(VGG, tolerance=1.0), removed=51.0, evaluations=49)])
    expect(table1, [row(VGG, evaluations=50)], "50 measurements are not 3 per block")
    expect(table1, [row(VGG, evaluations=60)], "60 measurements, the paper has 48")


def test_noise_that_is_as_good_as_images():
    real, noise = (replace(VGG, data=data) for data in ("own:1000", "noise:1000"))
    table3.check([row(real), row(noise, removed=49.0)])
    expect(table3, [row(real), row(noise)], "noise removes 50.0 %, real images 50.0 %")


def test_stages_that_are_missing_and_epochs_that_take_no_time():
    expect(table4, [row(VGG, stages={"search": 1.0})], r"has the stages \['search'\]")
    rows = [row(Case("n", "retraining", epochs=e), stages={"training": 1.0}) for e in (1, 10)]
    expect(table4, rows, "more epochs take no longer")


def test_first_layers_that_lose_less_without_steps():
    step, whole = (replace(VGG, constraint=each) for each in ("step", "global"))
    fig4.check([row(step), row(whole, sparsity={"a": 0.6, "b": 0.0})])
    expect(
        fig4,
        [row(step), row(whole, sparsity={"a": 0.4, "b": 0.9})],
        "first layers lose 0.62 of what all do, by steps 1.33",
    )


def test_a_selector_that_is_no_better_than_chance():
    rows = [row(replace(VGG, selector=each)) for each in ("forward", "random")]
    expect(fig5, rows, "forward removes 50.0 %, random 50.0 %")


def test_losses_that_fall_or_lie_below_those_of_cap():
    forward, other = (Case("n", selector=each) for each in ("forward", "l2"))
    fig6.check([row(forward, losses={"a": [0.1, 0.2]}), row(other, losses={"a": [0.2, 0.2]})])
    expect(fig6, [row(forward, losses={"a": [0.2, 0.1]})], "the loss falls with sparsity")
    rows = [row(forward, losses={"a": [0.2, 0.3]}), row(other, losses={"a": [0.1, 0.2]})]
    expect(fig6, rows, "l2 loses 0.14142, CaP 0.24495")


def test_orders_that_decide_nothing():
    rows = [row(replace(VGG, order=each)) for each in ("bottom-up", "top-down")]
    expect(fig7, rows, "the order decides nothing")


def test_weights_that_decide_nothing():
    plain, slope = (replace(VGG, weighting=each) for each in ("none", "slope"))
    weighting.check([row(plain), row(slope, sparsity={"a": 0.4, "b": 0.25})])
    expect(weighting, [row(plain), row(slope)], "the weighting decides nothing")
    expect(weighting, [row(plain, removed=0.0)], "removes nothing")


def test_epochs_that_hurt_and_compensation_that_does_not_help():
    start = Case("n", "uniform", kept=0.4, selector="l2", recovery="one-pass", epochs=0)
    expect(retraining, [row(start), row(replace(start, epochs=9), top1=91.9)], "9 epochs take 93.00 to 91.90")
    expect(retraining, [row(start), row(replace(start, recovery="none"))], "93.00 with compensation, 93.00 without")


def test_a_case_without_a_row_and_one_that_came_to_nothing():
    with pytest.raises(AssertionError, match="has no row"):
        require_rows([], [VGG])
    with pytest.raises(AssertionError, match="out of reach"):
        require_rows([failed(VGG, "out of reach")], [VGG])
