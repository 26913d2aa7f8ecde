import json

import pytest
import torch
from click.testing import CliRunner

from recoup.cli import main
from recoup.cli.demo import free_folder, run_demo
from recoup.errors import ArtefactError


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo") / "result")


def test_half_the_work_gone_for_at_most_a_point_on_images_never_looked_at(demo):
    assert demo.report.macs_removed >= 0.5
    assert demo.drop <= 1.0
    assert demo.before > 97


def test_saved_result_measures_the_same_from_the_command_line(demo):
    result = CliRunner().invoke(
        main, ["evaluate", str(demo.folder), "--data", "digits@test", "--input", "1,8,8", "--json"]
    )
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert measured["accuracy"] == pytest.approx(demo.after, abs=0.3)  # one image more or less, by rounding
    assert measured["macs"] == demo.report.after.macs


def test_json_is_plain(demo):
    data = json.loads(json.dumps(demo.to_json(), allow_nan=False))
    assert data["test"]["drop"] == pytest.approx(demo.before - demo.after)
    assert data["report"]["macs_removed"] == demo.report.macs_removed
    assert data["seconds"] == demo.seconds > 0


def test_existing_folder_is_refused_before_training(tmp_path):
    threads, told = torch.get_num_threads(), []
    with pytest.raises(ArtefactError, match="exists already"):
        run_demo(tmp_path, lambda *step: told.append(step))
    assert not told and not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads


def test_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(free_folder()) == "recoup-demo"
    for name in ("recoup-demo", "recoup-demo-2"):
        (tmp_path / name).mkdir()
    assert str(free_folder()) == "recoup-demo-3"


def test_command_prints_figures_and_how_to_go_on(demo, monkeypatch):
    asked = {}

    def done(folder, progress, *, device, seed):
        asked.update(folder=str(folder), device=str(device), seed=seed)
        return demo

    monkeypatch.setattr("recoup.cli.demo.run_demo", done)
    result = CliRunner().invoke(main, ["demo", "-o", "there", "--seed", "5"])
    assert result.exit_code == 0, result.output
    assert asked == {"folder": "there", "device": "cpu", "seed": 5}
    assert f"{demo.report.after.macs:,}" in result.stdout and f"{demo.after:.2f}" in result.stdout
    assert str(demo.folder / "report.html") in result.stdout
    assert "█" in result.stdout and "░" in result.stdout
    assert "recoup.prune(model" in result.stderr
    as_json = CliRunner().invoke(main, ["demo", "--json"])
    assert json.loads(as_json.stdout)["folder"] == str(demo.folder)
