"""A few random networks each time, and that the laws can fail: planted defects are found and made small."""

from __future__ import annotations

import copy
import dataclasses
import shlex
import time

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import LockedError
from tests.fuzz import laws, runner
from tests.fuzz.comparison import PRECISE, compare, relative_error
from tests.fuzz.kinds import FORMS, KINDS
from tests.fuzz.laws import Outcome, check
from tests.fuzz.networks import METHODS, STEMS, Case, Step, build, draw, parse, runs, simpler
from tests.fuzz.runner import Tally, command, describe, main, reason
from tests.fuzz.shrink import shrink

CONV = Step("Conv", {"kernel": 3, "stride": 1, "dilation": 1, "bias": True, "mode": "zeros"})
SEED, NUMBERS = 7, (1, 2, 4, 5, 7, 8, 9, 11, 12, 14, 16, 20, 21, 23, 24, 25, 26, 28, 30, 32)


@pytest.mark.parametrize("number", NUMBERS)
def test_no_law_is_broken(number):
    case = draw(SEED, number)
    assert check(case).broken == {}, f"{describe(case)}\n{command(case)}"


def test_copies_are_installed_and_go():
    """A generator that is mostly refused, or finds no channel to copy, would test little."""
    assert check(Case((CONV,))) == Outcome(notes=("copies", "own class"))
    assert check(Case((Step("Maze", {"by": "heads"}),))).notes[:2] == ("copies", "standalone")


def test_there_are_pieces_of_many_kinds():
    assert len(KINDS) >= 40
    assert {kind.reads for kind in KINDS.values()} == set(FORMS) == set(STEMS.values())


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_piece_runs_with_each_of_its_options(kind):
    stem = next(stem for stem, form in STEMS.items() if form == kind.reads)
    simplest = {name: values[0] for name, values in kind.options.items()}
    choices = [{}, *({name: value} for name, values in kind.options.items() for value in values[1:])]
    for choice in choices:
        assert runs(Case((Step(kind.name, {**simplest, **choice}),), stem=stem)), choice


def test_a_case_is_the_same_whenever_it_is_drawn_printed_or_built():
    for number in range(20):
        case = draw(11, number)
        assert parse(str(case)) == case == draw(11, number)
        first, second = (build(case).state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert len({str(draw(11, number)) for number in range(20)}) == 20


def test_methods_take_turns():
    assert [draw(11, number).method for number in range(4)] == list(METHODS)
    assert draw(11, 3, ("fast",)).method == "fast"


# Laws that can fail


def plant(monkeypatch, change):
    """A defect in whatever `prune` returns: `change` is given the result and the caller's model."""
    prune = recoup.prune

    def broken(model, *args, **options):
        result = prune(model, *args, **options)
        return change(result, model) or result

    monkeypatch.setattr(recoup, "prune", broken)


def swap_inputs(result, _):
    """Two input channels of the last piece change places."""
    weight = result.model.body[-1].conv.weight
    weight.data = weight.data[:, [1, 0, *range(2, weight.shape[1])]]


def triple(result, model):
    """What is refitted is made three times as large, in the plan too."""
    plan = dataclasses.replace(result.plan, weights={name: 3 * value for name, value in result.plan.weights.items()})
    return recoup.Result(recoup.apply(model, plan), plan, result.report)


def test_swapped_channels_are_found_and_the_network_is_made_small(monkeypatch):
    plant(monkeypatch, swap_inputs)
    case = Case((Step("Norm", {"norm": "batch"}, "add"), CONV), output="tuple", cut="width")
    assert "masked" in check(case).broken
    assert shrink(case, "masked", check) == Case((CONV,))


@pytest.mark.parametrize("output", ["fill", "finfo", "with_class", "complex"])
def test_swapped_channels_are_found_beside_numbers_that_hide_them(monkeypatch, output):
    plant(monkeypatch, swap_inputs)
    assert "masked" in check(Case((CONV,), output=output)).broken


def test_a_defect_that_is_in_the_plan_too_is_found(monkeypatch):
    """There the result is what the plan says, and only what it does tells that the plan is wrong."""
    plant(monkeypatch, triple)
    assert set(check(Case((CONV,))).broken) == {"copies"}
    assert set(check(Case((CONV,), method="fast")).broken) == {"copies", "refit"}
    assert set(check(Case((CONV,), cut="width", method="fast")).broken) == {"refit"}


class Moody(nn.Module):
    """A layer that changes its mind where `when` says so."""

    def __init__(self, layer, when):
        super().__init__()
        self.layer, self.when, self.spoilt = layer, when, ""

    def train(self, mode=True):
        self.spoilt += "train" if mode else ""
        return super().train(mode)

    def __deepcopy__(self, memo):
        twin = Moody(copy.deepcopy(self.layer, memo), self.when)
        twin.training, twin.spoilt = self.training, self.spoilt + "copied"
        return twin

    def forward(self, x):
        return self.layer(x) + float(self.when(self, x))


@pytest.mark.parametrize(
    ("law", "when"),
    [
        ("batch", lambda layer, x: len(x) == 9),
        ("size", lambda layer, x: x.shape[2] == 12),
        ("train", lambda layer, x: "train" in layer.spoilt),
        ("deepcopy", lambda layer, x: "copied" in layer.spoilt and x.dtype == torch.float32),
        ("masked", lambda layer, x: x.dtype == torch.float64),
    ],
)
def test_a_result_that_is_right_at_first_is_looked_at_again(monkeypatch, law, when):
    def spoil(result, _):
        result.model.head = Moody(result.model.head, when)

    plant(monkeypatch, spoil)
    assert law in check(Case((CONV,), head="dense", cut="width")).broken


@pytest.mark.parametrize(
    ("law", "change"), [("load", lambda m: m.head.bias.data.add_(1)), ("load mode", nn.Module.train)]
)
def test_what_is_loaded_is_compared_with_what_was_saved(monkeypatch, law, change):
    load = recoup.load

    def wrong(*args):
        loaded = load(*args).eval()
        change(loaded)
        return loaded

    monkeypatch.setattr(recoup, "load", wrong)
    assert law in check(Case((CONV,), cut="width")).broken


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.head.bias.data.add_(1),
        lambda model: model.banned.logical_not_(),
        lambda model: model.train(),
        lambda model: torch.rand(1),
        lambda model: setattr(model.head, "bias", nn.Parameter(model.head.bias.detach().clone())),
    ],
)
def test_a_model_of_the_callers_that_is_touched_is_found(monkeypatch, change):
    plant(monkeypatch, lambda result, model: change(model) and None)
    assert "caller" in check(Case((CONV,), cut="width")).broken


def test_errors_that_are_not_ours_are_found_and_ours_are_counted(monkeypatch):
    def fail(error):
        def raised(*args, **options):
            raise error

        monkeypatch.setattr(recoup, "prune", raised)
        return check(Case((CONV,), cut="width"))

    assert list(fail(ValueError("zip")).broken) == ["raw ValueError in prune"]
    refused = fail(LockedError("nothing"))
    assert (refused.end, refused.refused) == ("refused", "LockedError: nothing")


def compute(*args, **options):
    while True:
        pass


@pytest.mark.parametrize(("limit", "hang"), [("LONGEST", lambda *args, **options: time.sleep(9)), ("SECONDS", compute)])
def test_a_case_that_hangs_is_found(monkeypatch, limit, hang):
    monkeypatch.setattr(laws, limit, 3)
    monkeypatch.setattr(recoup, "prune", hang)
    assert list(check(Case((CONV,), cut="width")).broken) == ["hang"]


def test_a_case_that_has_to_wait_for_the_processor_does_not_hang(monkeypatch):
    def wait(*args, **options):
        time.sleep(5)
        raise LockedError("nothing")

    monkeypatch.setattr(laws, "SECONDS", 4)
    monkeypatch.setattr(recoup, "prune", wait)
    assert not check(Case((CONV,), cut="width")).broken


# Comparing


def far_apart():
    return torch.cat([torch.randn(9, 4), torch.full((9, 2), -1e9)], 1).double()


def test_a_filled_in_number_hides_nothing():
    a = far_apart()
    b = a.clone()
    b[3, 1] += 1e-3
    assert compare(a, a.clone(), PRECISE, lambda: a).what is None
    assert "at (3, 1)" in compare(a, b, PRECISE, lambda: a).what
    assert relative_error(a, b) > 1e-5


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3).double()),
        ((torch.ones(3), None), (torch.ones(3), torch.ones(1))),
        ({"a": torch.ones(3)}, {"b": torch.ones(3)}),
        ((torch.ones(3), 5), (torch.ones(3), 6)),
        (torch.arange(3), torch.tensor([0, 2, 1])),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.ones(3), torch.tensor([1.0, 1.0, torch.nan])),
        (torch.complex(torch.ones(3), torch.ones(3)), torch.complex(torch.ones(3), torch.zeros(3))),
    ],
)
def test_what_differs_is_seen(expected, actual):
    assert compare(expected, actual, PRECISE, lambda: expected).what is not None


def test_what_hangs_on_a_tie_is_not_held_against_a_result():
    expected, actual, shaken = torch.tensor([1, 2, 0]), torch.tensor([1, 3, 0]), torch.tensor([1, 4, 0])
    assert compare(expected, actual, PRECISE, lambda: shaken).what is None
    assert compare(expected, actual, PRECISE, lambda: expected).what is not None


# The runner


def test_simpler_cases_are_simpler():
    case = draw(11, 5)
    assert all(len(str(less)) != 0 and less != case for less in simpler(case))
    assert simpler(Case(())) == []


def test_a_printed_network_can_be_run_again(capsys):
    assert main(["--network", str(Case((CONV,), cut="width"))]) == 0
    assert "Conv(kernel=3" in capsys.readouterr().out


def test_a_failure_is_printed_made_small_and_written_down(monkeypatch, capsys, tmp_path):
    def judged(case):
        return Outcome({"masked": "wrong"} if CONV in case.steps else {})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "check", judged)
    norm = Step("Norm", {"norm": "batch"})
    assert main(["--shrink", "--network", str(Case((norm, CONV, norm), cut="width", output="tuple"))]) == 1
    (written,) = [path.read_text() for path in tmp_path.rglob("*masked.txt")]
    assert written in capsys.readouterr().out
    repeated = shlex.split(written.splitlines()[-1])
    assert repeated[:4] == ["python", "-m", "tests.fuzz", "--network"]
    assert parse(repeated[4]) == Case((CONV,))


def test_the_last_lines_name_every_broken_network(monkeypatch, capsys, tmp_path):
    ends = {8: Outcome({"copies": "lost", "masked": "wrong"}), 7: Outcome(), 5: Outcome({"size": "wrong"})}

    def results(seed, options):
        return [(number, Case((CONV,)), outcome) for number, outcome in ends.items()]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_results", results)
    monkeypatch.setattr(runner, "check", lambda case: Outcome())
    assert main(["--seed", "303"]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "3 networks: broken 2 (66.7%), held 1 (33.3%); 2 of seed 303 broke a law",
        "broken: seed 303, network 5, size",
        "broken: seed 303, network 8, copies, masked",
    ]


def test_cases_are_counted_by_how_they_end():
    tally = Tally()
    tally.add(0, Case((CONV,)), Outcome())
    tally.add(1, Case((CONV,)), Outcome(refused="LockedError: nothing in body.0.conv2 (3 groups) can go"))
    tally.add(2, Case((CONV,)), Outcome({"size": "wrong"}))
    assert str(tally) == "3 networks: held 1 (33.3%), refused 1 (33.3%), broken 1 (33.3%)"
    assert tally.refusals == {"LockedError: nothing in # # can go": 1}
    assert tally.laws == {"size": 1}
    assert tally.pieces == {"Conv": 3}
    assert reason("a 1") == reason("a 2")
