"""`recoup finetune`: from a saved folder to a new one that loads, evaluates and tells its history."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import recoup
from recoup.cli import main
from recoup.cli.models import open_model
from recoup.training import loop

pytest.importorskip("sklearn")


# Every group may be cut, whatever the paper spares.
PAPER = ("--method", "paper", "--unit", "layer", "--classifier")


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A network for the digits that was trained for a moment, cut to a third by the paper's method."""
    folder = tmp_path_factory.mktemp("pruned")
    torch.manual_seed(0)
    save_file(open_model("recoup:digits").model.state_dict(), folder / "weights.safetensors")
    words = ("--weights", folder / "weights.safetensors", "--calibration", "digits@train", "--calibration-images", 200)
    found = run("prune", "recoup:digits", *words, "--macs", 0.3, *PAPER, "-o", folder / "smaller")
    assert found.exit_code == 0, found.output
    return folder


TRAIN = ("--data", "digits@train", "--limit", 300, "--batch-size", 50, "--rate", 0.1)


def test_a_result_is_trained_saved_loaded_and_evaluated(pruned, tmp_path):
    words = (*TRAIN, "--validation", "digits@validation", "--epochs", 2, "--augment", "crop", "--json")
    found = run("finetune", pruned / "smaller", *words, "-o", tmp_path / "trained")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["training"]["epochs"] == 2 and told["training"]["augment"] == "crop"
    assert told["history"][1]["loss"] < told["history"][0]["loss"]
    assert [p.name for p in tmp_path.iterdir()] == ["trained"]  # no checkpoint is left
    evaluated = run("evaluate", tmp_path / "trained", "--data", "digits@validation", "--json")
    assert json.loads(evaluated.stdout)["accuracy"] == pytest.approx(told["history"][1]["accuracy"], abs=0.3)
    before, after = (
        recoup.load(folder, open_model("recoup:digits").model) for folder in (pruned / "smaller", tmp_path / "trained")
    )
    assert {n: v.shape for n, v in before.state_dict().items()} == {n: v.shape for n, v in after.state_dict().items()}
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert not after.training
    for name in ("plan.json",):
        assert (pruned / "smaller" / name).read_text() == (tmp_path / "trained" / name).read_text()


def test_the_report_tells_of_the_training_and_adds_to_it(pruned, tmp_path):
    once = run("finetune", pruned / "smaller", *TRAIN, "--epochs", 1, "-o", tmp_path / "once")
    twice = run("finetune", tmp_path / "once", *TRAIN, "--epochs", 2, "-o", tmp_path / "twice")
    assert once.exit_code == twice.exit_code == 0, once.output + twice.output
    reports = [json.loads((folder / "report.json").read_text()) for folder in (pruned / "smaller", tmp_path / "twice")]
    assert reports[0]["finetuned"] == [] and len(reports[1]["finetuned"]) == 3
    assert {**reports[1], "finetuned": []} == reports[0]
    pages = [(folder / "report.html").read_text() for folder in (pruned / "smaller", tmp_path / "twice")]
    assert "not retrained" in pages[0] and "Fine-tuning" not in pages[0]
    assert "fine-tuned for 3 epochs" in pages[1] and "Fine-tuning" in pages[1] and "not retrained" not in pages[1]


def test_a_run_that_was_stopped_is_resumed(pruned, tmp_path, monkeypatch):
    words = (pruned / "smaller", *TRAIN, "--epochs", 2)
    assert run("finetune", *words, "-o", tmp_path / "whole").exit_code == 0
    measure = loop._Loop.run

    def stopping(self, epoch, batches):
        if epoch == 1:
            raise KeyboardInterrupt
        return measure(self, epoch, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Loop, "run", stopping)
        stopped = run("finetune", *words, "-o", tmp_path / "rest")
    assert stopped.exit_code == 1 and "interrupted" in stopped.stderr
    checkpoint = tmp_path / "rest.checkpoint.safetensors"
    assert checkpoint.exists() and not (tmp_path / "rest").exists()
    refused = run("finetune", *words, "-o", tmp_path / "rest")
    assert refused.exit_code == 1 and "Go on from it with --resume" in refused.stderr
    resumed = run("finetune", *words, "-o", tmp_path / "rest", "--resume")
    assert resumed.exit_code == 0 and not checkpoint.exists()
    whole, rest = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert whole == rest


def test_a_teacher_is_the_original_with_its_weights(pruned, tmp_path):
    words = ("--data", "digits@train", "--limit", 200, "--epochs", 1, "--loss", "distillation")
    refused = run("finetune", pruned / "smaller", *words, "-o", tmp_path / "taught")
    assert refused.exit_code == 2 and "Give its trained ones with --teacher-weights" in refused.stderr
    words = (*words, "--teacher-weights", pruned / "weights.safetensors")
    assert run("finetune", pruned / "smaller", *words, "-o", tmp_path / "taught").exit_code == 0


FIXED = """
import torch
from torch import nn

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.b(self.norm(self.a(x)).relu()).view(-1, 8, 16).relu().mean(2))

def build():
    torch.manual_seed(0)
    return Fixed().eval()
"""


def test_a_standalone_result_is_trained_without_its_class(tmp_path):
    (tmp_path / "mine.py").write_text(FIXED)
    data = ("--input", "1,8,8", "--normalise", "none")
    words = ("--calibration", "digits@train", "--widths", "a=5", "--method", "paper", *data)
    found = run("prune", f"{tmp_path / 'mine.py'}:build", *words, "-o", tmp_path / "smaller")
    assert found.exit_code == 0 and (tmp_path / "smaller" / "graph.json").exists(), found.output
    (tmp_path / "mine.py").unlink()
    words = (
        "--data",
        "digits@train",
        "--batch-size",
        100,
        "--rate",
        0.2,
        "--epochs",
        3,
        "--json",
        "--normalise",
        "none",
    )
    found = run("finetune", tmp_path / "smaller", *words, "-o", tmp_path / "trained")
    assert found.exit_code == 0, found.output
    losses = [epoch["loss"] for epoch in json.loads(found.stdout)["history"]]
    assert losses[2] < losses[1] < losses[0]
    before, after = (recoup.load(tmp_path / name) for name in ("smaller", "trained"))
    assert not torch.equal(before.get_buffer("norm.running_mean"), after.get_buffer("norm.running_mean"))
    graphs = [(tmp_path / name / "graph.json").read_text() for name in ("smaller", "trained")]
    assert json.loads(graphs[0]) == json.loads(graphs[1])


def test_what_makes_no_sense_is_refused_before_the_work(pruned, tmp_path):
    smaller, new = pruned / "smaller", tmp_path / "new"
    taken = tmp_path / "taken"
    taken.mkdir()
    damaged = tmp_path / "damaged"
    shutil.copytree(smaller, damaged)
    (damaged / "report.json").write_text("{}")
    for words, code, said in (
        ((smaller, *TRAIN, "-o", taken), 1, "exists already"),
        ((taken, *TRAIN, "-o", new), 1, "is not a folder that recoup saved"),
        ((damaged, *TRAIN, "-o", new), 1, "is damaged"),
        ((smaller, *TRAIN, "--optimiser", "adam", "-o", new), 2, "unknown optimiser"),
        ((smaller, "--data", "noise:64", "-o", new), 2, "has no labels. Give labelled data, or say --loss"),
        ((smaller, *TRAIN, "--validation", "noise:64", "-o", new), 2, "has no labels, so accuracy"),
        ((smaller, *TRAIN, "--teacher-weights", "w.pt", "-o", new), 2, "does not ask for a teacher"),
    ):
        found = run("finetune", *words)
        assert (found.exit_code, said in " ".join(found.stderr.split())) == (code, True), found.stderr
    assert not new.exists()


def test_the_paper_takes_a_recovery(pruned, tmp_path):
    words = ("--weights", pruned / "weights.safetensors", "--calibration", "digits@train", "--macs", 0.5)
    found = run(
        "prune",
        "recoup:digits",
        *words,
        "--method",
        "paper",
        "--recovery",
        "batch-norm",
        "-o",
        tmp_path / "a",
        "--json",
    )
    assert found.exit_code == 0 and json.loads(found.stdout)["report"]["method"]["recovery"] == "batch-norm"
    found = run("prune", "recoup:digits", *words, *PAPER, "--recovery", "joint", "-o", tmp_path / "b")
    assert found.exit_code == 2 and "calibrate with Best() or Fast()" in found.stderr
    found = run("prune", "recoup:digits", *words, "--recovery", "none", "-o", tmp_path / "b")
    assert found.exit_code == 2 and "--recovery is no option of the method 'best'" in found.stderr
