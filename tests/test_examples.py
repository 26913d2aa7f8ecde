"""Every script of examples/ runs, in this process and small, and says what it promises to say."""

import functools
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image

import recoup
from recoup.allocation import timing
from tests.timers import Work
from tests.torchvision_operators import define_missing_torchvision_operators

EXAMPLES = Path(__file__).parents[1] / "examples"
FEW = ["--epochs", "2"]
FAST = [*FEW, "--method", "fast"]
SHARED = {"digits"}


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch, tmp_path):
    """As `python examples/NAME.py` would have it, in a folder that may be written to."""
    define_missing_torchvision_operators()
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)


def run(name, *arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.RecoupWarning)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture
def printed(capsys, monkeypatch):
    return lambda name, *arguments: run(name, *arguments, capsys=capsys, monkeypatch=monkeypatch)


def removed(out):
    """The share of the MACs that every report in the output says is gone."""
    return [float(share) / 100 for share in re.findall(r"MACs [\d,]+ -> [\d,]+ \(-([\d.]+)%\)", out)]


def test_every_example_is_run_here():
    told = set(re.findall(r'printed\("(\w+)"', Path(__file__).read_text()))
    assert told | SHARED == {path.stem for path in EXAMPLES.glob("*.py")}


def test_a_model_of_ones_own_with_pictures_of_a_folder(printed, tmp_path):
    out = printed("own_model_and_folder", "--tolerance", "5", "--output", "smaller", *FAST)
    (after,) = re.findall(r"accuracy [\d.]+ -> ([\d.]+)", out)
    (again,) = re.findall(r"loaded again: ([\d.]+) %", out)
    assert float(again) == pytest.approx(float(after), abs=0.4)
    assert removed(out)[0] > 0.1
    assert (tmp_path / "smaller" / "report.html").exists()


def test_a_timm_network_with_a_budget(printed, tmp_path):
    pytest.importorskip("timm")
    out = printed("timm_budget", "--model", "test_resnet", "--size", "32")
    assert 0.3 <= removed(out)[0] < 0.5
    assert "divergence from the original on other pictures" in out


def test_pictures_are_prepared_as_timm_says(tmp_path):
    timm = pytest.importorskip("timm")
    for number in range(3):
        Image.new("RGB", (50, 40), (80 * number, 0, 255)).save(tmp_path / f"{number}.png")
    read = runpy.run_path(str(EXAMPLES / "timm_budget.py"))["read"]
    batches = read(tmp_path, timm.create_model("test_resnet"), 32, batch_size=2)
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 32, 32), (1, 3, 32, 32)]


def test_no_labels(printed):
    out = printed("no_labels", "--tolerance", "8", *FAST)
    by_agreement, _ = removed(out)
    assert by_agreement > 0.03
    assert re.search(r"agreement 100\.00 -> 9\d\.\d\d", out)
    assert re.search(r"parameters [\d,]+ -> [\d,]+ \(-(49|5\d)", out)


def test_latency(printed, monkeypatch):
    for name in ("operation_timings", "network_seconds"):  # a busy machine is no reason to fail
        monkeypatch.setattr(timing, name, functools.partial(getattr(timing, name), timer=Work()))
    out = printed("latency", *FEW)
    assert re.search(r"share 0\.[45]\d, asked for 0\.60, met: True", out)


def test_prune_then_finetune(printed):
    out = printed("prune_then_finetune", *FAST)
    original, pruned, tuned = map(float, re.findall(r"original ([\d.]+), pruned ([\d.]+), fine-tuned ([\d.]+)", out)[0])
    assert removed(out)[0] >= 0.9
    assert pruned < tuned
    assert tuned > original - 10


def test_export(printed, tmp_path):
    out = printed("export", "--output", "smaller.onnx", *FAST)
    assert len(re.findall(r"(torch\.export|ONNX Runtime): largest difference \d\.\de-?[\d+]+", out)) == 2
    assert (tmp_path / "smaller.onnx").exists()
