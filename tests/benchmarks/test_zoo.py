"""The benchmark of architectures: nothing that a network does stops it, and its rows become a page."""

import dataclasses
import functools
import json
import sys
from collections import Counter

import pytest
import torch
from benchmarks.zoo import copies, magnitude, pruned
from benchmarks.zoo.beyond.convolutional import with_places
from benchmarks.zoo.beyond.making import of
from benchmarks.zoo.child import examine
from benchmarks.zoo.masking import masked
from benchmarks.zoo.reading import both, call, images, numbers, tokens
from benchmarks.zoo.rows import CopiesRow, CutRow, PrunedRow, Reason, Setting, TheirRow, from_json, to_json
from benchmarks.zoo.runner import Limits, attempt, run
from benchmarks.zoo.spec import Spec
from benchmarks.zoo.store import Store, read
from benchmarks.zoo.suites import SUITES
from benchmarks.zoo.table import render, rewrite
from benchmarks.zoo.task import Task
from benchmarks.zoo.verdicts import RIGHT, verdict
from torch import nn

from tests.benchmarks import children

PRUNED = CutRow("pruned", "", "half", 2_000_000_000, 0.5, 0.1, 0.25, (Reason(0.25, "a | b"),), "class", 1e-16, True)
ROWS = {
    "small": {"magnitude": PRUNED, "torch-pruning": TheirRow("pruned", "", 2_000_000_000, 0.3, 1e-15)},
    "wrong": {"magnitude": CutRow("untouched"), "torch-pruning": TheirRow("pruned", "", 10, 0.3, 0.2)},
    "broken": {"magnitude": CutRow("crash", "killed by SIGABRT")},
}


SETTING = Setting(48, None, "1 core")


def test_what_kills_a_child_is_a_row():
    row = attempt(children.abort, "fast", Limits(seconds=60))
    assert (row.result, row.why) == ("crash", "killed by SIGABRT")


def test_what_a_child_raises_is_a_row(capsys):
    row = attempt(children.fail, "magnitude", Limits(seconds=60))
    assert (row.result, row.why) == ("crash", "MemoryError: not enough")
    assert "in fail" in capsys.readouterr().err  # where it happened is told as well


def test_a_child_that_hangs_or_says_nothing_is_a_row():
    row = attempt(children.sleep, "magnitude", Limits(seconds=1))
    assert (row.result, row.why) == ("time-out", "not done after 1 s")
    assert attempt(children.nothing, "magnitude", Limits(seconds=60)).why == "exit code 0"


def test_the_row_is_what_the_child_writes():
    assert attempt(functools.partial(children.write, PRUNED), "magnitude", Limits(seconds=60)) == PRUNED


def test_an_error_of_the_network_is_a_row():
    def broken():
        raise ValueError("no such width")

    spec = dataclasses.replace(SUITES["odd"](None)["two inputs"], factory=broken)
    assert examine("magnitude", spec, 8) == CutRow("crash", "ValueError: no such width")
    row = examine("best", spec, 8)
    assert (row.result, row.why, row.setting.samples) == ("crash", "ValueError: no such width", 8)


def test_rows_are_kept_as_they_come_and_known_ones_skipped(tmp_path, monkeypatch, capsys):
    from benchmarks.zoo import __main__ as command

    store = Store(tmp_path / "odd.json")
    store.add("two inputs", "magnitude", PRUNED)
    monkeypatch.setattr(sys, "argv", ["zoo", "--method", "magnitude", "--network", "two inputs", "conv1d"])
    tasks = command.waiting("odd", Store(store.path), command.parse())
    assert tasks == [Task("odd", "conv1d", "magnitude", 48, device="cpu")]
    run(tasks, store, Limits(), lambda task, limits: CutRow("untouched"))
    assert read(store.path) == {"conv1d": {"magnitude": CutRow("untouched")}, "two inputs": {"magnitude": PRUNED}}
    assert "1/1 odd conv1d magnitude: untouched" in capsys.readouterr().err


def test_rows_survive_json():
    for ways in ROWS.values():
        for way, row in ways.items():
            assert from_json(way, json.loads(json.dumps(to_json(row)))) == row


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
    row = magnitude.examine(SUITES["odd"](None)[name])
    assert verdict(row) == RIGHT
    assert row.goal == "half"
    assert 0 < row.least < row.kept <= 0.5
    assert row.difference < 1e-10


def test_the_suites_are_whole():
    assert {suite: len(build(None)) for suite, build in SUITES.items()} == {
        "torchvision": 80,
        "timm": 97,
        "dense": 6,
        "odd": 22,
        "beyond": 164,
    }


def test_networks_are_the_same_twice_and_depend_on_their_inputs():
    spec = SUITES["odd"](None)["zero-pad shortcut"]
    first, second = spec.build(), spec.build()
    assert not first.training
    assert all(len(parameter.unique()) > 1 for parameter in first.parameters())
    with torch.no_grad():
        one, other = call(first, spec.example(2))
        torch.testing.assert_close(call(second, spec.example(2))[0], one, rtol=0, atol=0)
    assert (one - other).abs().max() > 1e-2 * one.abs().max()


def test_a_deep_network_of_a_benchmark_neither_forgets_its_inputs_nor_explodes():
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 1))
        for _ in range(48)
    ]
    spec = Spec(lambda: nn.Sequential(nn.Conv2d(3, 16, 1), *blocks, nn.BatchNorm2d(16)), images(4))
    model = spec.build()
    with torch.no_grad():
        first, second = (call(model, spec.example(64, seed)) for seed in (3, 4))
    apart = (first - second).std() / 2**0.5
    assert 0.3 < float(apart) < 100  # 10,000 with noise of one size for all channels
    assert all(float((norm.running_var - 1).abs().max()) > 0.1 for norm in model.modules() if is_norm(norm))


def is_norm(module):
    return isinstance(module, nn.BatchNorm2d)


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


def test_a_method_is_called_as_users_call_it(monkeypatch):
    readings = iter((100, 130))  # the real peak does not rise where an earlier test has been higher
    monkeypatch.setattr(pruned, "peak_memory", lambda device: next(readings))
    row = pruned.examine(SUITES["odd"](None)["squeeze and excite"], "fast", SETTING)
    assert verdict(row) == RIGHT
    assert (row.goal, row.form, row.fell_back, row.setting) == ("half", "class", False, SETTING)
    assert row.kept <= 0.5
    assert row.left == round(row.kept * row.macs)
    assert not row.counted
    assert row.error < 1
    assert row.memory == 30
    assert set(row.seconds) == {"trace", "prune", "total"}


def test_networks_and_inputs_are_drawn_on_the_cpu_and_lie_where_they_run():
    here = SUITES["odd"](None)["two inputs"]
    there = dataclasses.replace(here, device="meta")
    assert {tensor.device.type for tensor in there.build().state_dict().values()} == {"meta"}
    assert [tensor.device.type for batch in there.batches(3, 2) for tensor in batch] == ["meta"] * 4
    assert [tensor.shape for tensor in there.example(2)] == [tensor.shape for tensor in here.example(2)]


def test_where_the_class_alone_serves_the_goal_is_half_way_to_what_it_can_lose():
    class Fixed(nn.Module):
        """Its code fixes the size of the wide layer, and the number of samples."""

        def __init__(self):
            super().__init__()
            self.wide, self.narrow, self.head = nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(8, 3)

        def forward(self, x):
            wide = self.wide(x).relu().view(int(x.shape[0] / 1.0), -1, 64)
            return self.head(self.narrow(wide).relu())

    spec = dataclasses.replace(SUITES["odd"](None)["gated linear unit"], factory=Fixed)
    row = pruned.examine(spec, "fast", SETTING)
    assert (row.result, row.goal, row.why, row.form) == ("pruned", "half way", "", "class")
    assert 0.5 < row.kept < 0.9


def test_layers_that_choose_their_inputs_choose_different_ones():
    model = nn.Linear(2, 2)
    model.register_buffer("index", torch.zeros(6, dtype=torch.long))
    model.register_buffer("other", torch.zeros(6, dtype=torch.long))
    assert with_places(model).index.sort().values.tolist() == list(range(6))
    assert not model.other.any()


def test_where_counts_of_macs_differ_torchs_is_told_by_operation():
    class Odd(nn.Module):
        """A product that is not in the graph."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, x):
            result = self.second(self.first(x).relu())
            if not torch.compiler.is_exporting():
                result = result + (x @ x.transpose(1, 2)).mean()
            return result

    spec = dataclasses.replace(SUITES["odd"](None)["gated linear unit"], factory=Odd)
    row = pruned.examine(spec, "fast", SETTING)
    assert row.counted


def test_refusals_and_fallbacks_are_told_apart():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return self.second(self.first(x).relu())

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(16, 8)

        def forward(self, x):
            return self.only(x)

    spec = SUITES["odd"](None)["gated linear unit"]
    row = pruned.examine(dataclasses.replace(spec, factory=Remembers), "fast", SETTING)
    assert (row.result, row.fell_back) == ("pruned", True)
    row = pruned.examine(dataclasses.replace(spec, factory=Alone), "fast", SETTING)
    assert row.result == "refused"
    assert row.why.startswith("LockedError: nothing in Alone can be pruned")


@pytest.mark.parametrize("name", ["squeeze and excite", "grouped convolution, GroupNorm"])
def test_copies_lose_nothing(name):
    row = copies.examine(SUITES["odd"](None)[name], "fast", SETTING)
    assert (row.result, row.why) == ("kept", "")
    assert row.apart <= copies.ALIKE
    assert 0 < 2 * row.gone <= row.channels


def test_channels_that_are_no_copies_are_noticed(monkeypatch):
    monkeypatch.setattr("tests.fuzz.copies.make_copies", lambda model, structure, twin: None)
    row = copies.examine(SUITES["odd"](None)["squeeze and excite"], "fast", SETTING)
    assert row.result == "no copies"
    assert "tells copies apart" in row.why
    assert row.apart > copies.ALIKE


def test_inputs_are_as_users_give_them():
    generator = torch.Generator().manual_seed(0)
    batch = both(tokens(50, 6), pixel_values=images(8), labels=numbers(5))(4, generator)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (4, 6),
        "attention_mask": (4, 6),
        "pixel_values": (4, 3, 8, 8),
        "labels": (4,),
    }
    assert batch["attention_mask"].sum(1).tolist() == [6, 5, 4, 6]
    assert ((batch["input_ids"] > 0) == (batch["attention_mask"] > 0)).all()
    assert [len(part) for (part,) in SUITES["odd"](None)["conv1d"].batches(20, 8)] == [8, 8, 4]


def test_libraries_that_are_not_there_are_named(monkeypatch, tmp_path, capsys):
    from benchmarks.zoo import __main__ as command

    networks = {"there": SUITES["odd"](None)["conv1d"], "lost": of("no_such_library.models:Net", images(8))}
    monkeypatch.setitem(command.SUITES, "odd", lambda size: networks)
    monkeypatch.setattr(sys, "argv", ["zoo", "--method", "fast", "best", "--samples", "12", "--size", "40"])
    tasks = command.waiting("odd", Store(tmp_path / "odd.json"), command.parse())
    assert tasks == [Task("odd", "there", way, 12, 40) for way in ("fast", "best")]
    said = capsys.readouterr().err
    assert "1 networks of no_such_library are left out" in said
    assert "benchmarks/zoo/requirements.txt" in said


def test_images_of_another_size():
    sizes = {suite: Counter(spec.size for spec in SUITES[suite](96).values()) for suite in ("torchvision", "timm")}
    assert sizes["torchvision"] == {96: 79, 224: 1}  # maxvit_t has windows that fit 224 alone
    assert sizes["timm"][96] > 50
    spec = SUITES["torchvision"](96)["vit_b_32"]
    assert spec.factory.keywords == {"image_size": 96}
    assert spec.example(2)[0].shape == (2, 3, 96, 96)


METHODS = {
    "done": {
        "fast": PrunedRow(
            "pruned", "", SETTING, "half", 2_000_000_000, 0.5, 2_000_000_000, 10**9, locked=0.0, error=0.01,
            difference=1e-16, same_shapes=True, seconds={"total": 3.2}, memory=90,
        ),
        "best-copies": CopiesRow(
            "kept", "", SETTING, "half", 5, 10, 1e-7, "seen", 2e-6, seconds={"total": 4.0}, memory=95,
        ),
    },
    "other": {
        "fast": PrunedRow(
            "pruned", "", Setting(16, 64, "1 core"), "half way", 100, 0.7, 100, 50, {"aten.mm": 100}, 0.1, form="graph",
            warned=("the paper's method is used: it remembers",), same_shapes=True, seconds={"total": 1.0},
        ),
        "best-copies": CopiesRow("lost", "", SETTING, error=0.3, seconds={"total": 1.0}),
    },
    "not": {"fast": PrunedRow("refused", "CaptureError: Llama cannot be captured", SETTING)},
    "nor": {"fast": PrunedRow("refused", "CaptureError: Qwen2 cannot be captured", SETTING)},
}  # fmt: skip


def test_methods_have_a_table_of_their_own():
    page = render({"beyond": METHODS})
    assert "magnitude" not in page
    assert "- `fast` on random inputs: 16 to 48 samples, images of side 64; 1 core." in page
    assert "|  | `fast`: 4 | `best-copies`: 2 |" in page
    assert f"| {RIGHT} | 2 |  |" not in page
    assert f"| {RIGHT} | 2 | 0 |" in page
    assert "| nothing is lost | 0 | 1 |" in page
    assert "| of the first line: done by the paper's method in its place | 1 |  |" in page
    assert "| of the first line: MACs within 1 % of torch's count, before and after | 1 |  |" in page
    assert "| `fast` | refused: CaptureError: the model cannot be captured | not, nor |" in page
    assert "| `fast` | 50 MACs after, 70 by torch | other |" in page
    assert "| `best-copies` | lost: 3e-01 of the spread of the outputs | other |" in page
    assert "| done | 2 | 0% | pruned | 50% | 1e-02 | 1e-16 | 3, 90 | kept, on what was seen | 2e-06 | 4, 95 |" in page
    assert (
        "| other | 1e-07 | 10% | pruned, as a graph, by the paper's method | 70% | - | - | 1, 0 | lost | 3e-01 |"
        in page
    )
    widths = {row.count(" | ") for row in page.splitlines() if row.startswith(("| network", "| done", "| other"))}
    assert len(widths) == 1


def test_the_other_library_stands_beside_the_methods_where_nothing_else_was_cut():
    rows = {"one": {"best": PrunedRow("pruned", kept=0.5), "torch-pruning": TheirRow("pruned", "", 10, 0.3, 1e-9)}}
    page = render({"beyond": rows})
    assert "|  | `best`: 1 | `torch-pruning`: 1 |" in page and "magnitude" not in page
    assert page.splitlines()[-1].endswith("| pruned | 30% | 1e-09 |")
    both = render({"beyond": {"one": {**rows["one"], "magnitude": PRUNED}}})
    assert "`torch-pruning`" not in both and "| Torch-Pruning | kept | difference |" in both
