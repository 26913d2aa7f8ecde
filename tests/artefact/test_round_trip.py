import json

import torch
from torch import nn

import recoup
from recoup.artefact.reading import read_plan, read_source
from tests.zoo import ZOO

FILES = {"manifest.json", "plan.json", "model.safetensors", "samples.safetensors", "report.json", "report.html"}


def test_the_folder_holds_plan_weights_and_report(tmp_path):
    entry = ZOO["plain"]
    result = recoup.prune(entry.build(6), [entry.batch()], budget=recoup.Budget(width=0.5))
    folder = result.save(tmp_path / "deep" / "out", source="zoo:plain")
    assert {path.name for path in folder.iterdir()} == FILES
    assert read_source(folder) == "zoo:plain"
    report = json.loads((folder / "report.json").read_text())
    assert report["after"]["macs"] == result.report.after.macs
    assert report["macs_removed"] == result.report.macs_removed
    plan, added = read_plan(folder)
    assert {name: mask.tolist() for name, mask in plan.keep.items()} == {
        name: mask.tolist() for name, mask in result.plan.keep.items()
    }
    assert plan.recovery == result.plan.recovery
    assert set(added) == {"0.2.0.bias"}


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.head = (nn.Linear(6, 6) for _ in range(4))
            self.c.weight = self.b.weight

        def forward(self, x):
            return self.head(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))

    result = recoup.prune(Tied(), [torch.randn(60, 6)], budget=recoup.Budget(width=0.5))
    again = recoup.load(result.save(tmp_path / "out"), Tied)
    assert again.b.weight is again.c.weight
    x = torch.randn(4, 6)
    assert torch.equal(again(x), result.model(x))


def test_nothing_is_pickled(tmp_path):
    entry = ZOO["plain"]
    folder = recoup.prune(entry.build(6), [entry.batch()], budget=recoup.Budget(width=0.5)).save(tmp_path / "out")
    for path in folder.iterdir():
        assert path.read_bytes()[:2] not in (b"PK", b"\x80\x02")
