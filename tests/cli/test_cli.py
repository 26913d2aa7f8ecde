import functools
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from recoup import Budget, Released
from recoup.allocation import timing as timing_module
from recoup.allocation.timing import network_seconds, operation_timings
from recoup.artefact.files import FORMAT
from recoup.cli import main
from recoup.cli import prune as pruning_module
from recoup.cli.input_spec import CIFAR, IMAGENET, unnormalised
from recoup.cli.models import digits_resnet
from recoup.cli.network import choose_input, parse_shape
from recoup.errors import RecoupError, UsageError
from recoup.version import __version__
from tests.timers import Work

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 10),
    )

def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(20, 1, 8, 8, generator=generator), torch.arange(20) % 10)]

def broken():
    raise ValueError("first line\\nsecond line")
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(MODEL)
    return f"{path}:build"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a command gets as far as pruning."""

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the long work began")

    monkeypatch.setattr(pruning_module, "prune", never)


def prune(model: str, out: Path, *more: object) -> Result:
    return run("prune", model, "--input", "1,8,8", "--calibration", "digits@train", *more, "-o", out)


def refused(result: Result, code: int, *texts: str) -> None:
    """Exit code, nothing on stdout, and exactly one paragraph on stderr that starts with `error:`."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for text in texts:
        assert text in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"recoup {__version__}\n")


@pytest.mark.parametrize("command", ["demo", "inspect", "prune", "evaluate"])
def test_every_command_has_help_json_device_and_seed(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert all(option in result.stdout for option in ("--json", "--device", "--seed"))
    assert command == "demo" or "torchvision:NAME" in result.stdout


def test_unknown_model_names_the_nearest():
    refused(run("inspect", "recoup:vgg16bn"), 2, "There is no model 'recoup:vgg16bn'", "vgg16_bn")


def test_unknown_data(model, out, no_work):
    refused(run("prune", model, "--calibration", "cifra10", "--width", 0.5, "-o", out), 2, "no data called 'cifra10'")
    assert not out.exists()


def test_missing_weights_file(tmp_path):
    result = run("inspect", "recoup:digits", "--weights", tmp_path / "none.pt")
    refused(result, 1, f"There is no weights file at '{tmp_path / 'none.pt'}'")


@pytest.mark.parametrize("name", ["broken.pt", "broken.safetensors"])
def test_corrupt_weights(tmp_path, name):
    (tmp_path / name).write_bytes(b"not weights at all")
    refused(run("inspect", "recoup:digits", "--weights", tmp_path / name), 1, name, "could not be read")


def test_messages_become_one_paragraph(monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise RecoupError("first line\n  second line")

    monkeypatch.setattr("recoup.cli.inspect.inspect", fail)
    refused(run("inspect", "recoup:digits"), 1, "error: first line second line\n")


def test_a_factory_that_raises(model):
    refused(run("inspect", model.replace("build", "broken")), 1, "raised ValueError: first line")


def test_cuda_that_is_not_there(monkeypatch):
    def absent(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no driver\nfor this machine")

    monkeypatch.setattr(torch, "zeros", absent)
    refused(run("inspect", "recoup:digits", "--device", "cuda"), 2, "device 'cuda' is not available here (no driver)")


def test_device_that_does_not_exist():
    refused(run("inspect", "recoup:digits", "--device", "abacus"), 2, "device 'abacus' is not available")


@pytest.mark.parametrize("shape", ["3x32x32", "", "3,,32", "3,0,32", "-1"])
def test_bad_input_shape(shape):
    refused(run("inspect", "recoup:digits", f"--input={shape}"), 2, f"--input '{shape}' is not a shape", "3,32,32")


def test_unknown_option_is_a_usage_error():
    assert run("inspect", "recoup:digits", "--colour").exit_code == 2


def test_interrupt(monkeypatch):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("recoup.cli.inspect.inspect", interrupt)
    result = run("inspect", "recoup:digits")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "interrupted\n")


def test_a_bug_stays_a_traceback(monkeypatch):
    def bug(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("recoup.cli.inspect.inspect", bug)
    assert isinstance(run("inspect", "recoup:digits").exception, ZeroDivisionError)


def test_inspect_lists_groups_and_reasons(model):
    result = run("inspect", model, "--input", "1,8,8")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    # 6 channels of 3x3 kernels over one input at 64 positions
    macs, parameters = 6 * 9 * 64, 6 * 9 + 6
    assert lines["0"].split() == ["0", "6", "of", "6", f"{macs:,}", "16.6", str(parameters), "15.2", "2"]
    assert "the model returns it" in lines["6"]
    assert "2 of 3 groups prunable" in result.stdout
    # one channel in each: (9 + 9) kernels at 64 positions and ten outputs, of 3,456 + 17,280 + 50
    assert f"{(64 * 18 + 10) / 20786:.1%} of the MACs" in result.stdout


def test_inspect_as_json_and_nothing_else(model):
    result = run("inspect", model, "--input", "1,8,8", "--json")
    data = json.loads(result.stdout)
    assert data["prunable"] == 2
    assert data["cost"]["parameters"] == 6 * 9 + 6 + 5 * 6 * 9 + 5 + 5 * 10 + 10
    assert [group["row"]["name"] for group in data["groups"]] == ["0", "2", "6"]
    assert [group["parameters"] for group in data["groups"]] == [60, 275, 60]
    assert data["edges"] == [{"source": "0", "target": "2"}, {"source": "2", "target": "6"}]
    least = {"macs": 64 * 18 + 10, "parameters": (9 + 1) * 2 + 10 + 10, "elementwise": 64 * 2}
    assert data["least"] == {**least, "flops": 64 * 18 + 10 + 64 * 2}


def test_inspect_draws_a_picture(model, tmp_path):
    path = tmp_path / "new" / "groups.svg"
    result = run("inspect", model, "--input", "1,8,8", "--json", "--picture", path)
    assert (result.exit_code, result.stderr) == (0, f"picture: {path}\n")
    assert json.loads(result.stdout)["prunable"] == 2
    assert path.read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("there.svg", 1, "there.svg exists already"),
        ("there.svg/groups.svg", 1, "is not a folder you may write to"),
        ("groups.png", 2, "ends in .svg"),
    ],
)
def test_a_picture_is_refused_before_the_work(model, tmp_path, monkeypatch, name, code, text):
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("recoup.cli.inspect.inspect", never)
    (tmp_path / "there.svg").write_text("mine")
    refused(run("inspect", model, "--input", "1,8,8", "--picture", tmp_path / name), code, text)
    assert [path.name for path in tmp_path.glob("*.svg")] == ["there.svg"]
    assert (tmp_path / "there.svg").read_text() == "mine"


def test_existing_output_folder_is_left_as_it_was(model, out, no_work):
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    refused(prune(model, out, "--width", 0.5), 1, f"{out} exists already", "nothing was overwritten")
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    assert (out / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("tolerance", ["0", "-1", "nan"])
def test_tolerance_must_be_above_zero(model, out, no_work, tolerance):
    result = prune(model, out, f"--tolerance={tolerance}", "--validation", "digits@validation")
    refused(result, 2, f"--tolerance must be above 0 points, got {tolerance}")


def test_the_published_search_needs_labels(model, out):
    refused(prune(model, out, "--tolerance", 1, "--method", "paper"), 2, "a tolerance needs something to measure")


@pytest.mark.parametrize("goal", [("--tolerance", 5), ("--macs", 0.5)])
def test_validation_without_labels_measures_agreement(model, out, goal):
    result = prune(model, out, *goal, "--validation", "noise:80", "--method", "fast", "--json")
    assert result.exit_code == 0, result.stderr
    score = json.loads(result.stdout)["report"]["score"]
    assert (score["what"], score["before"]) == ("agreement", 100.0)


def test_two_goals_or_none(model, out, no_work):
    refused(prune(model, out, "--macs", 0.5, "--width", 0.5), 2, "exactly one of", "got --macs, --width")
    refused(
        prune(model, out, "--latency", 0.5, "--tolerance", 1),
        2,
        "and --latency, or --widths alone; got --tolerance, --latency",
    )
    refused(prune(model, out), 2, "exactly one of", "got none")


@pytest.mark.parametrize("share", ["0", "1.5"])
def test_share_out_of_range(model, out, no_work, share):
    refused(prune(model, out, "--macs", share), 2, "the share to keep must lie above 0 and not above 1")


def test_unknown_fields(model, out, no_work):
    refused(prune(model, out, "--width", 1, "--method", "papre"), 2, "unknown method 'papre'", "'paper'")
    refused(prune(model, out, "--width", 1, "--selector", "l3"), 2, "unknown selector 'l3'")
    refused(prune(model, out, "--width", 1, "--method", "paper", "--order", "sideways"), 2, "unknown order 'sideways'")
    refused(prune(model, out, "--width", 1, "--outputs", "scores"), 2, "unknown outputs 'scores'")
    refused(prune(model, out, "--width", 1, "--ridge", -1), 2, "ridge must be a number of at least 0")


def test_data_that_does_not_suit_the_model(out, no_work):
    result = run("prune", "recoup:resnet20", "--calibration", "digits", "--width", 0.5, "-o", out)
    refused(result, 1, "images of shape (1, 8, 8)", "(3, 32, 32)")


def test_fields_reach_the_pruning(model, out, monkeypatch):
    seen: dict[str, object] = {}

    def stop(*args: object, **kwargs: object) -> None:
        seen.update(kwargs)
        raise UsageError("enough")

    monkeypatch.setattr(pruning_module, "prune", stop)
    said = {"ridge": 0.25, "unit": "block", "steps": 5, "order": "top-down", "seed": 3}
    options = [part for name, value in said.items() for part in (f"--{name}", value)]
    assert prune(model, out, "--parameters", 0.5, "--method", "released", *options).exit_code == 2
    method, budget = seen["method"], seen["budget"]
    assert method == Released(**said)
    assert (budget.of, budget.share, seen["tolerance"]) == ("parameters", 0.5, None)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("best", ("--order", "top-down")),
        ("fast", ("--steps", 3)),
        ("fast", ("--classifier",)),
        ("paper", ("--confidence", 0.9)),
        ("paper", ("--refine", 60)),
        ("released", ("--weighting", "slope")),
    ],
)
def test_a_field_that_the_method_does_not_have_is_refused(model, out, no_work, method, option):
    result = prune(model, out, "--macs", 0.5, "--method", method, *option)
    refused(result, 2, f"{option[0]} is no option of the method '{method}', which has --selector")


def test_what_may_be_touched_reaches_the_pruning(model, out, monkeypatch):
    seen: dict[str, object] = {}

    def stop(*args: object, **kwargs: object) -> None:
        seen.update(kwargs)
        raise UsageError("enough")

    monkeypatch.setattr(pruning_module, "prune", stop)
    options = ("--only", "body*", "--exclude", "head", "--exclude", "x", "--min-width", 4, "--multiple-of", "device")
    assert prune(model, out, "--widths", "a.b=7", "--widths", "c=9", *options).exit_code == 2
    assert (seen["only"], seen["exclude"], seen["min_width"]) == (("body*",), ("head", "x"), 4)
    assert (seen["widths"], seen["budget"], seen["tolerance"]) == ({"a.b": 7, "c": 9}, None, None)
    assert seen["method"].multiple_of == "device"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--widths", "conv1"), "no width by hand. Write a group and its channels"),
        (("--widths", "conv1=many"), "no width by hand"),
        (("--multiple-of", "eight"), "neither a whole number nor 'device'"),
    ],
)
def test_texts_that_are_no_numbers_are_refused(model, out, no_work, option, told):
    result = prune(model, out, "--macs", 0.5, *option)
    assert result.exit_code == 2 and told in " ".join(result.stderr.split())


def test_groups_that_do_not_exist_are_named(model, out):
    for option in (("--only", "nowhere"), ("--exclude", "nowhere"), ("--widths", "nowhere=3")):
        result = prune(model, out, "--macs", 0.9, "--method", "fast", *option)
        refused(result, 2, "unknown group or module in", "'nowhere'; there are")


def test_a_share_of_the_time_reaches_the_pruning(model, out, monkeypatch):
    seen: dict[str, object] = {}

    def stop(*args: object, **kwargs: object) -> None:
        seen.update(kwargs)
        raise UsageError("enough")

    monkeypatch.setattr(pruning_module, "prune", stop)
    assert prune(model, out, "--latency", 0.6).exit_code == 2
    assert seen["budget"] == Budget(latency=0.6)


def test_the_time_of_a_batch_is_shown(model, out, monkeypatch):
    for name, function in (("operation_timings", operation_timings), ("network_seconds", network_seconds)):
        monkeypatch.setattr(timing_module, name, functools.partial(function, timer=Work()))
    result = prune(model, out, "--latency", 0.6, "--method", "fast", "--batch-size", 50)
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if "Time of a batch" in line]
    latency = json.loads((out / "report.json").read_text())["latency"]
    macs = 64 * 9 * 6 + 64 * 9 * 6 * 5 + 50
    assert (latency["before"], latency["asked"]) == (50 * macs, 0.6)
    assert latency["share"] <= 0.6
    assert row.split()[-1] == f"{latency['share'] - 1:+.1%}"
    assert "Time of a batch" in (out / "report.html").read_text()


def test_time_is_not_for_published_methods(model, out):
    refused(prune(model, out, "--latency", 0.6, "--method", "paper"), 2, "a latency budget needs", "method='best'")


def test_prune_then_evaluate(model, out):
    data = model.replace("build", "batches")
    pruned = prune(model, out, "--macs", 0.6, "--validation", data, "--calibration-images", 64, "--json")
    assert pruned.exit_code == 0, pruned.output
    answer = json.loads(pruned.stdout)
    report = answer["report"]
    assert answer["folder"] == str(out)
    assert report["after"]["macs"] <= 0.6 * report["before"]["macs"]
    assert report["samples"] == 64
    assert {path.name for path in out.iterdir()} >= {"plan.json", "model.safetensors", "report.json", "report.html"}
    assert f"recoup evaluate {out} --data {data} --model {model} --input 1,8,8" in pruned.stderr

    measured = run("evaluate", out, "--data", data, "--model", model, "--input", "1,8,8", "--json")
    assert measured.exit_code == 0, measured.output
    again = json.loads(measured.stdout)
    assert again["accuracy"] == pytest.approx(report["score"]["after"])
    assert (again["images"], again["macs"]) == (20, report["after"]["macs"])
    assert again["flops"] == report["after"]["flops"] > again["macs"]
    assert again["top5"] is None is report["score"]["top5_after"]


def test_more_than_ten_classes_have_a_top5_accuracy(tmp_path, out):
    path = tmp_path / "wide.py"
    path.write_text(MODEL.replace("nn.Linear(5, 10)", "nn.Linear(5, 16)").replace("% 10", "% 16"))
    model, data = f"{path}:build", f"{path}:batches"
    pruned = prune(model, out, "--width", 0.8, "--validation", data, "--calibration-images", 64)
    assert pruned.exit_code == 0, pruned.output
    (row,) = [line.split() for line in pruned.stdout.splitlines() if "Top-5 accuracy" in line]
    score = json.loads((out / "report.json").read_text())["score"]
    assert row[2:4] == [f"{score['top5_before']:.2f}", f"{score['top5_after']:.2f}"]
    measured = run("evaluate", out, "--data", data, "--model", model, "--input", "1,8,8")
    (row,) = [line.split() for line in measured.stdout.splitlines() if "Top-5" in line]
    assert row == ["Top-5", "accuracy", f"{score['top5_after']:.2f}"]


def test_prune_within_a_tolerance_prints_tables(model, out):
    result = prune(model, out, "--tolerance", 100, "--validation", "digits@validation", "--calibration-images", 64)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["MACs"][1] == f"{6 * 9 * 64 + 5 * 6 * 9 * 64 + 50:,}"
    assert int(rows["MACs"][2].replace(",", "")) < int(rows["MACs"][1].replace(",", ""))
    assert rows["FLOPs"][1] == f"{6 * 9 * 64 + 5 * 6 * 9 * 64 + 50 + (6 + 5) * 64:,}"
    assert int(rows["FLOPs"][2].replace(",", "")) < int(rows["FLOPs"][1].replace(",", ""))
    assert rows["Accuracy"][-1] == "points"
    assert rows["0"][1] == "6" and int(rows["0"][2]) < 6
    assert rows["6"][1:3] == ["10", "10"] and "locked:" in rows["6"]
    assert "search ..." in result.stderr and "search ..." not in result.stdout


def test_evaluate_a_model_prints_its_figures(model):
    result = run("evaluate", model, "--data", "digits@test", "--input", "1,8,8", "--limit", 50)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split()[-1] for line in result.stdout.splitlines() if line.strip()}
    assert rows["Images"] == "50"
    assert rows["FLOPs"] == f"{6 * 9 * 64 + 5 * 6 * 9 * 64 + 50 + (6 + 5) * 64:,}"
    assert rows["Parameters"] == f"{6 * 9 + 6 + 5 * 6 * 9 + 5 + 5 * 10 + 10}"
    assert 0 <= float(rows["Accuracy"]) <= 100


def test_fresh_weights_are_pointed_out(model, tmp_path):
    weights = tmp_path / "digits.pt"
    torch.save(digits_resnet().state_dict(), weights)
    said = "note: recoup:digits has fresh random weights"
    data = ("--data", "digits@test", "--limit", 8)
    assert said in run("evaluate", "recoup:digits", *data).stderr
    assert run("evaluate", "recoup:digits", *data, "--weights", weights).stderr == ""
    assert run("evaluate", model, *data, "--input", "1,8,8").stderr == ""


def test_fresh_weights_depend_on_the_seed(model):
    def accuracy(seed: int) -> float:
        result = run("evaluate", model, "--data", "digits", "--input", "1,8,8", "--seed", seed, "--json")
        return float(json.loads(result.stdout)["accuracy"])

    assert accuracy(1) == accuracy(1)
    assert len({accuracy(seed) for seed in (1, 2, 3)}) > 1


def test_evaluate_without_labels():
    refused(run("evaluate", "recoup:digits", "--data", "noise:4"), 2, "--data noise:4 has no labels")


def test_evaluate_a_folder_that_is_no_result(tmp_path):
    result = run("evaluate", tmp_path, "--data", "digits")
    refused(result, 1, "plan.json is missing", f"{tmp_path} is not a folder that recoup saved")


def test_evaluate_a_result_without_source(tmp_path):
    fields = {
        "keep": {},
        "slices": [],
        "added": {},
        "shapes": {},
        "recovery": {},
        "untied": [],
        "norms": [],
        "idle": [],
        "settings": {},
    }
    plan = {"format": FORMAT, "recoup": "0", "model": "Net", "source": None, **fields}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    refused(run("evaluate", tmp_path, "--data", "digits"), 2, "does not say which model", "--model")
    refused(run("evaluate", tmp_path, "--data", "digits", "--weights", "w.pt"), 2, "holds its own weights")


def test_evaluate_imports_nothing_that_only_the_folder_names(model, tmp_path, out):
    """Whoever hands over a folder may name any file in it; to build its model would run that file."""
    assert prune(model, out, "--width", 0.5, "--method", "paper", "--calibration-images", 64).exit_code == 0
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef build():\n    pass\n")
    plan = json.loads((out / "plan.json").read_text())
    (out / "plan.json").write_text(json.dumps({**plan, "source": f"{tmp_path}/evil.py:build"}))
    result = run("evaluate", out, "--data", "noise:8", "--input", "1,8,8")
    refused(
        result, 2, f"made from '{tmp_path}/evil.py:build'", "not imported unasked", f"--model {tmp_path}/evil.py:build"
    )
    assert not mark.exists()


def test_original_is_only_for_saved_results():
    result = run("evaluate", "recoup:digits", "--model", "recoup:digits", "--data", "digits")
    refused(result, 2, "recoup:digits is no folder")


def test_shapes():
    assert parse_shape(None) is None
    assert parse_shape("3, 32,32") == (3, 32, 32)


def test_input_is_what_the_model_declares_unless_told_otherwise():
    assert choose_input(CIFAR, None, None) == CIFAR
    resized = choose_input(CIFAR, (3, 64, 64), None)
    assert (resized.shape, resized.mean) == ((3, 64, 64), CIFAR.mean)
    assert choose_input(IMAGENET, (1, 8, 8), None) == unnormalised((1, 8, 8))
    assert choose_input(IMAGENET, (3, 32, 32), "cifar") == CIFAR
    assert choose_input(CIFAR, None, "none") == unnormalised((3, 32, 32))
    with pytest.raises(UsageError, match="one of each per channel"):
        choose_input(IMAGENET, (1, 8, 8), "cifar")


SHUFFLED = """
import torch
from torch import nn

class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return self.b(y.view(len(y), 4, 4, 8, 8).transpose(1, 2).reshape(y.shape).mean((2, 3)))

def build():
    torch.manual_seed(0)
    return Shuffled().eval()

def batches():
    return [(torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 10)]
"""


def test_a_standalone_result_is_pruned_said_to_be_one_and_evaluated(tmp_path, out):
    path = tmp_path / "shuffled.py"
    path.write_text(SHUFFLED)
    common = ("--calibration", f"{path}:batches", "--width", 0.6, "--multiple-of", 4, "--input", "1,8,8", "-o")
    done = run("prune", f"{path}:build", *common, out, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["report"]
    assert "the result is a standalone graph" in done.stderr
    assert "its code moves channels" in report["form"]
    assert report["groups"][0]["after"] == 12
    assert "standalone graph" in (out / "report.html").read_text()
    measured = run("evaluate", out, "--data", f"{path}:batches", "--input", "1,8,8", "--json")
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["macs"] == report["after"]["macs"]
    held = run("prune", f"{path}:build", *common, tmp_path / "held", "--keep-class")
    assert held.exit_code == 1
    assert "nothing in Shuffled can be pruned" in held.stderr


def test_inspect_shows_what_is_left_alone(model):
    result = run("inspect", model, "--input", "1,8,8", "--exclude", "0", "--json")
    assert result.exit_code == 0, result.stderr
    groups = {group["row"]["name"]: group["row"] for group in json.loads(result.stdout)["groups"]}
    assert "left alone by request" in groups["0"]["reasons"]
    refused(run("inspect", model, "--input", "1,8,8", "--only", "nowhere"), 2, "unknown group or module in only")
