"""The frame: rows are stored as they come, a second run goes on, and what fails is told."""

import json
import queue
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
from benchmarks.paper.cases import Case, Outcome, Row
from benchmarks.paper.command import command_of, main, parse
from benchmarks.paper.elsewhere import found_elsewhere
from benchmarks.paper.experiment import run, settings_of, together
from benchmarks.paper.opening import at_hand, weights_of
from benchmarks.paper.workbench import Clock

from benchmarks.paper import experiment, fig4, opening, retraining, table2
from recoup.cli.models import open_model
from recoup.errors import BudgetError, ModelError, UsageError
from tests.benchmarks.paper.rows import STAMP, row

CASES = [Case("small-vgg", seed=seed, tolerance=tolerance) for seed in (0, 1) for tolerance in (1.0, 2.0)]


class StoppedError(Exception):
    """Somebody pressed a key."""


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "sample_of", lambda case, options: None)
    return parse(["table2", "--smoke", "--out", str(tmp_path)])


def measuring(measure, cases=CASES):
    return replace(table2.EXPERIMENT, cases=lambda options: cases, measure=measure)


def test_a_second_run_goes_on_where_the_first_stopped(options):
    done = []

    def measure(sample, case, options):
        if len(done) == 2:
            raise StoppedError
        done.append(case)
        return row(case).outcome

    with pytest.raises(StoppedError):
        run(measuring(measure), options)
    stored = json.loads((options.out / "table2.json").read_text())["rows"]
    assert [each["case"]["seed"] for each in stored] == [0, 0] and len(done) == 2
    made = run(measuring(lambda sample, case, options: done.append(case) or row(case).outcome), options)
    assert done == CASES and {each.case for each in made} == set(CASES) and len(made) == len(CASES)
    assert made[0].stamp.machine == "CPU" and set(made[0].stamp.versions) == {"recoup", "torch", "python"}
    assert (options.docs / "paper" / "table2.svg").exists()


def test_no_case_begins_after_the_minutes_and_a_second_run_goes_on(options, monkeypatch):
    done = []

    def measure(sample, case, options):
        done.append(case)
        options.until = -1.0 if len(done) == 3 else None
        return row(case).outcome

    assert len(run(measuring(measure), options)) == 3
    options.until = None
    run(measuring(measure), options)
    assert done == CASES


def test_a_part_of_the_cases_can_be_asked_for(options):
    options.only = {"seed": ["1"], "tolerance": ["1.0", "9.0"]}
    made = run(measuring(lambda sample, case, options: row(case).outcome), options)
    assert [each.case for each in made] == [CASES[2]]
    given = parse(["fig5", "--smoke", "--only", "selector=l1,l2", "seed=0", "--minutes", "1"])
    assert given.only == {"selector": ["l1", "l2"], "seed": ["0"]} and 0 < given.until - time.time() <= 60


def test_many_epochs_come_last_but_for_what_is_drawn():
    given = parse(["retraining", "--smoke", "--epochs", "0", "1", "10", "--selectors", "backward", "fpgm"])
    cases = retraining.cases(given)
    late = [case for case in cases if (case.epochs or 0) > 1 and not retraining.is_drawn(case)]
    assert late and cases[-len(late) :] == late and {case.selector for case in late} == {"fpgm", "backward"}


def test_rows_that_are_stored_are_shown_and_not_made(options):
    run(measuring(lambda sample, case, options: row(case).outcome), options)
    options.table = True
    assert len(run(measuring(None), options)) == len(CASES)


def test_rows_of_other_settings_are_not_mixed(options):
    run(measuring(lambda sample, case, options: row(case).outcome), options)
    options.images = 7
    with pytest.raises(UsageError, match="were made with"):
        run(measuring(None), options)


def test_what_is_out_of_reach_is_a_row_and_what_is_not_installed_is_none(options, capsys):
    def measure(sample, case, options):
        raise BudgetError("out of reach") if case.seed else ModelError("not installed")

    made = run(measuring(measure, CASES[1:3]), options)
    assert [(each.case, each.outcome) for each in made] == [(CASES[2], Outcome(note="out of reach"))]
    assert "skipped, not installed" in capsys.readouterr().err


def test_cases_that_share_a_ranking_stay_together():
    cases = [Case("n", selector=each, tolerance=t) for t in (1.0, 2.0) for each in ("l2", "random")]
    assert together(cases) == [[cases[0], cases[2]], [cases[1], cases[3]]]


def test_rows_of_processes_come_as_they_are_made_and_a_failure_is_raised():
    made, good, bad = queue.Queue(), Future(), Future()
    first = Row(CASES[0], Outcome(), STAMP)
    made.put(first)
    good.set_result(None)
    assert list(experiment._received(made, [good])) == [first]
    bad.set_exception(MemoryError("full"))
    with pytest.raises(MemoryError, match="full"):
        list(experiment._received(made, [good, bad]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "invalid choice: 'table9'"),
        (["table2"], "--cifar or --imagenet must be said; --smoke needs neither"),
        (["table2", "--smoke", "--networks", "vgg16"], "there is no vgg16; known are small-vgg"),
        (["fig5", "--smoke", "--selectors", "best"], "invalid choice: 'best'"),
        (["table1", "--smoke", "--weights", "file.pt"], "file.pt is not NETWORK=FILE with one of vgg16"),
        (["fig5", "--smoke", "--only", "colour=red"], "colour=red is not FIELD=VALUE with one of network, method"),
        (["table1", "--smoke", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["table1", "--smoke", "--beside", "-1"], "--beside must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_run_is_refused(words, message, capsys, monkeypatch):
    monkeypatch.delenv("RECOUP_CIFAR10", raising=False)
    with pytest.raises(SystemExit):
        parse(words)
    assert message in capsys.readouterr().err


def test_a_network_that_was_asked_for_must_be_there(tmp_path):
    given = parse(["table1", "--cifar", "x", "--checkpoints", str(tmp_path), "--networks", "resnet50"])
    with pytest.raises(UsageError, match="no weights or images for resnet50"):
        at_hand(("resnet50",), given)
    given.networks = None
    assert at_hand(("resnet50", "resnet50-imagenet"), given) == []
    (tmp_path / "resnet50_cifar10.safetensors").touch()
    assert at_hand(("resnet50", "resnet50-imagenet"), given) == ["resnet50"]
    given.weights = {"resnet50": "other.pt"}
    assert str(weights_of("resnet50", given)) == "other.pt"


def test_a_recorded_command_has_nobodys_places():
    words = ["all", "--cifar", "/home/me/cifar", "--out=/tmp/x", "--jobs", "3", "--weights", "vgg19=/home/me/w.pt"]
    assert command_of("fig4", words) == "python -m benchmarks.paper fig4 --cifar DIR --out DIR --weights vgg19=FILE"


def test_rows_say_how_many_processes_shared_the_machine(options):
    options.beside = 3
    made = run(measuring(lambda sample, case, options: row(case).outcome, CASES[:1]), options)
    assert [each.stamp.shared for each in made] == [4]


def test_another_source_must_have_as_many_images_as_are_asked_for(tmp_path):
    import numpy
    from PIL import Image

    for number in range(3):
        Image.fromarray(numpy.full((32, 32, 3), number, dtype=numpy.uint8)).save(tmp_path / f"{number}.png")
    given = parse(["table3", "--smoke", "--other-source", str(tmp_path)])
    spec = open_model("recoup:vgg16_bn").input
    read = opening._sources(spec, lambda count, seed: [], given)
    assert sum(len(images) for images in read("other:3", 0)) == 3
    with pytest.raises(UsageError, match="has 3 images, and 4 are asked for"):
        read("other:4", 0)


def test_images_are_drawn_by_count_and_seed():
    batches = [(torch.arange(4.0) + start, torch.arange(4) + start) for start in (0, 4)]
    first, again, other = (opening.drawn_from(batches, "own:6", seed) for seed in (0, 0, 1))
    drawn = [torch.cat([labels for _, labels in each]) for each in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2]) and len(set(drawn[0].tolist())) == 6
    assert all(torch.equal(images.long(), labels) for images, labels in first)
    for data in ("own:9", "noise:4"):
        with pytest.raises(UsageError, match="8 images of the network's own and no others"):
            opening.drawn_from(batches, data, 0)


def test_fresh_weights_are_drawn_anew_and_those_of_the_sample_stay(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start = retraining.Start(model, Outcome(), Clock())
    monkeypatch.setattr(retraining, "cut_alike", lambda sample, case: start)
    first, again = (retraining.with_fresh_weights(None, Case("n", "scratch", seed=1)).model for _ in range(2))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(first[0].weight, again[0].weight) and not torch.equal(first[0].weight, model[0].weight)
    monkeypatch.setattr(retraining, "cut_alike", lambda sample, case: replace(start, model=nn.Identity()))
    with pytest.raises(ModelError, match="captured graph"):
        retraining.with_fresh_weights(None, Case("n", "scratch"))


def test_a_lost_meaning_makes_the_command_fail(options, tmp_path, monkeypatch, capsys):
    broken = measuring(lambda sample, case, options: row(case, validation_drop=5.0).outcome)
    monkeypatch.setattr("benchmarks.paper.command.EXPERIMENTS", {"table2": broken})
    with pytest.raises(SystemExit, match="failed: table2"):
        main(["table2", "--smoke", "--out", str(tmp_path)])
    assert "table2 does not mean what it should" in capsys.readouterr().err


def test_residual_networks_are_also_searched_layer_by_layer():
    cases = fig4.cases(parse(["fig4", "--smoke"]))
    assert {case.network for case in cases if case.unit == "layer"} == {"small-resnet"}
    assert len({fig4.constraint_of(case) for case in cases}) == 3


def test_a_search_that_another_experiment_made_is_taken_over(options):
    """By steps, bottom-up and by blocks is what the method does by itself; random order is another search."""
    asked = [Case("small-vgg", tolerance=2.0, order=order) for order in ("bottom-up", "random")]
    before = replace(fig4.EXPERIMENT, cases=lambda options: [Case("small-vgg", tolerance=2.0, constraint="step")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "sample_of", lambda case, options: None)
        made = run(
            replace(before, measure=lambda sample, case, options: row(case, flops_removed=33.0).outcome), options
        )
    assert [each.outcome.flops for each in made] == [33.0]
    assert [each.case for each in found_elsewhere(asked, options, settings_of(options))] == asked[:1]
    (found,) = found_elsewhere(asked, options, settings_of(options))
    assert found.outcome == made[0].outcome and found.stamp == made[0].stamp
    # Neither at another tolerance, nor of another seed, nor measured in another precision, nor with other settings.
    others = [Case("small-vgg", tolerance=3.0), Case("small-vgg", tolerance=2.0, seed=1)]
    assert not list(found_elsewhere(others, options, settings_of(options)))
    options.fast_evaluate = "bfloat16"
    assert not list(found_elsewhere(asked, options, settings_of(options)))
    options.fast_evaluate, options.images = None, 7
    assert not list(found_elsewhere(asked, options, settings_of(options)))


def test_only_experiments_that_search_take_searches_over(options, monkeypatch):
    """Another measure of the same case is made, not taken over."""
    monkeypatch.setattr(experiment, "found_elsewhere", lambda *_: pytest.fail("asked for"))
    assert len(run(measuring(lambda sample, case, options: row(case).outcome), options)) == len(CASES)
