"""The benchmark of architectures: nothing that a network does stops it, and its rows become a page."""

import dataclasses
import json
import sys

import pytest
import torch
from benchmarks.zoo import ours
from benchmarks.zoo.child import examine
from benchmarks.zoo.masking import masked
from benchmarks.zoo.rows import OurRow, Reason, TheirRow, from_json, to_json
from benchmarks.zoo.runner import Limits, Task, attempt, run
from benchmarks.zoo.store import Store, read
from benchmarks.zoo.suites import SUITES
from benchmarks.zoo.table import RIGHT, render, rewrite, verdict
from torch import nn

PRUNED = OurRow("pruned", "", "half", 2_000_000_000, 0.5, 0.1, 0.25, (Reason(0.25, "a | b"),), "class", 1e-16, True)
ROWS = {
    "small": {"ours": PRUNED, "theirs": TheirRow("pruned", "", 2_000_000_000, 0.3, 1e-15)},
    "wrong": {"ours": OurRow("untouched"), "theirs": TheirRow("pruned", "", 10, 0.3, 0.2)},
    "broken": {"ours": OurRow("crash", "killed by SIGABRT")},
}


@pytest.mark.parametrize(
    ("code", "result", "why"),
    [
        ("import os; os.abort()", "crash", "killed by SIGABRT"),
        ("raise MemoryError", "crash", "MemoryError"),
        ("import time; time.sleep(30)", "time-out", "not done after 1 s"),
        ("pass", "crash", "exit code 0"),
    ],
)
def test_whatever_goes_wrong_in_the_process_is_a_row(code, result, why):
    row = attempt([sys.executable, "-c", code], "ours", Limits(seconds=1 if "sleep" in code else 30))
    assert (row.result, row.why) == (result, why)


def test_the_row_is_what_the_process_writes():
    code = f"import sys; open(sys.argv[1], 'w').write({json.dumps(to_json(PRUNED))!r})"
    assert attempt([sys.executable, "-c", code], "ours", Limits(seconds=10)) == PRUNED


def test_an_error_of_the_network_is_a_row():
    def broken():
        raise ValueError("no such width")

    spec = dataclasses.replace(SUITES["odd"]()["two inputs"], factory=broken)
    assert examine("ours", spec) == OurRow("crash", "ValueError: no such width")


def test_rows_are_kept_as_they_come_and_known_ones_skipped(tmp_path, monkeypatch, capsys):
    from benchmarks.zoo import __main__ as command

    store = Store(tmp_path / "odd.json")
    store.add("two inputs", "ours", PRUNED)
    monkeypatch.setattr(sys, "argv", ["zoo", "--side", "ours", "--network", "two inputs", "conv1d"])
    tasks = command.waiting("odd", Store(store.path), command.parse())
    assert tasks == [Task("odd", "conv1d", "ours")]
    run(tasks, store, Limits(), lambda task, limits: OurRow("untouched"))
    assert read(store.path) == {"conv1d": {"ours": OurRow("untouched")}, "two inputs": {"ours": PRUNED}}
    assert "1/1 odd conv1d ours: untouched" in capsys.readouterr().err


def test_rows_survive_json():
    for sides in ROWS.values():
        for side, row in sides.items():
            assert from_json(side, json.loads(json.dumps(to_json(row)))) == row


def test_the_page_is_rewritten_between_its_markers():
    page = rewrite("above\n<!-- zoo -->\nold\n<!-- end -->\nbelow", render({"odd": ROWS, "timm": {}}))
    assert page.startswith("above\n<!-- zoo -->\n### odd: 3 networks")
    assert page.endswith("<!-- end -->\nbelow")
    assert "old" not in page
    assert f"| {RIGHT} | 1 | 1 |" in page
    assert "| smaller, but computes something else | 0 | 1 |" in page
    assert "| small | 2 | pruned | 50% | 10% | 25%; 25% a / b | 1e-16 | - | pruned | 30% | 1e-15 |" in page
    assert "- killed by SIGABRT (1)" in page
    assert rewrite(page, "") == "above\n<!-- zoo -->\n\n<!-- end -->\nbelow"


@pytest.mark.parametrize("name", ["two inputs", "concatenation with itself"])
def test_odd_networks_lose_half(name):
    row = ours.examine(SUITES["odd"]()[name])
    assert verdict(row) == RIGHT
    assert row.goal == "half"
    assert 0 < row.least < row.kept <= 0.5
    assert row.difference < 1e-10


def test_the_suites_are_whole():
    assert {suite: len(build()) for suite, build in SUITES.items()} == {
        "torchvision": 80,
        "timm": 97,
        "dense": 6,
        "odd": 22,
    }


def test_networks_are_the_same_twice_and_depend_on_their_inputs():
    spec = SUITES["odd"]()["zero-pad shortcut"]
    first, second = spec.build(), spec.build()
    assert not first.training
    assert all(len(parameter.unique()) > 1 for parameter in first.parameters())
    with torch.no_grad():
        one, other = first(*spec.example(2))
        torch.testing.assert_close(second(*spec.example(2))[0], one, rtol=0, atol=0)
    assert (one - other).abs().max() > 1e-2 * one.abs().max()


def test_the_masked_original_is_what_a_smaller_network_computes():
    kept = torch.tensor([0, 2, 3])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
        smaller = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
        x = torch.randn(6, 4).double()
    with torch.no_grad():
        for new, old in ((smaller[0].weight, whole[0].weight[kept]), (smaller[2].weight, whole[2].weight[:, kept])):
            new.copy_(old)
        smaller[0].bias.copy_(whole[0].bias[kept])
        smaller[2].bias.copy_(whole[2].bias)
        expected = smaller(x)
        actual = masked(whole, smaller, {"1": kept, "2": kept})(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
