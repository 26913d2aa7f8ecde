import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

import recoup
from recoup.channels.cost import Cost
from recoup.errors import ArtefactError, UsageError
from recoup.report.formatting import short
from recoup.report.inspection import Inspection
from tests.zoo import ZOO


def inspected(name: str, width: int = 6) -> Inspection:
    return recoup.inspect(ZOO[name].build(width), ZOO[name].batch(2))


def costs(seen: Inspection) -> dict[str, Cost]:
    return {group.row.name: Cost(group.macs, group.parameters) for group in seen.groups}


def edges(seen: Inspection) -> set[tuple[str, str]]:
    assert len(set(seen.edges)) == len(seen.edges)
    return {(edge.source, edge.target) for edge in seen.edges}


class NormBehindConcat(nn.Module):
    """A batch norm over the channels of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 2, 1, bias=False), nn.Conv2d(3, 5, 1)
        self.norm, self.head = nn.BatchNorm2d(7), nn.Conv2d(7, 4, 1)

    def forward(self, x):
        return self.head(self.norm(torch.cat([self.a(x), self.b(x)], dim=1)).relu()).mean((2, 3))


class NormBesideTheInput(nn.Module):
    """A batch norm over channels and over three inputs that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 1)

    def forward(self, x):
        return self.head(self.norm(torch.cat([self.a(x), x], dim=1)).relu()).mean((2, 3))


class AddedTwins(nn.Module):
    """Two layers that read the same channels and whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.a(x).relu()
        return self.head((self.b(x) + self.c(x)).relu())


def test_a_group_costs_what_its_layer_and_norm_cost():
    seen = inspected("plain")
    # 3x3 convolutions without bias at 8x8 and 4x4 positions, a scale and a shift per channel, a linear layer with bias
    assert costs(seen) == {
        "0.0.0": Cost(64 * 27 * 6, 27 * 6 + 2 * 6),
        "0.2.0": Cost(16 * 54 * 8, 54 * 8 + 2 * 8),
        "2": Cost(8 * 4, 8 * 4 + 4),
    }
    first = seen.groups[0]
    assert first.macs_share == pytest.approx(10368 / (10368 + 6912 + 32))
    assert first.parameters_share == pytest.approx(174 / (174 + 448 + 36))


def test_a_depthwise_layer_belongs_to_the_channels_it_follows():
    seen = inspected("depthwise")
    assert costs(seen)["0.0"] == Cost(64 * 27 * 6 + 64 * 9 * 6, 27 * 6 + 2 * 6 + 9 * 6 + 2 * 6)


def test_a_transposed_convolution_makes_its_second_dim():
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.ReLU(), nn.Conv2d(5, 4, 1)).eval()
    seen = recoup.inspect(model, torch.randn(1, 3, 4, 4))
    assert costs(seen) == {"0": Cost(16 * 4 * 3 * 5, 3 * 5 * 4 + 5), "2": Cost(25 * 5 * 4, 5 * 4 + 4)}


def test_a_norm_behind_a_concatenation_is_divided():
    seen = recoup.inspect(NormBehindConcat().eval(), torch.randn(1, 3, 2, 2))
    assert costs(seen) == {"a": Cost(24, 6 + 4), "b": Cost(60, 20 + 10), "head": Cost(112, 32)}


def test_what_belongs_to_no_channel_belongs_to_no_group():
    seen = recoup.inspect(NormBesideTheInput().eval(), torch.randn(1, 3, 2, 2))
    assert costs(seen) == {"a": Cost(24, 8 + 4), "head": Cost(80, 24)}
    assert seen.cost.parameters == 8 + 10 + 24


@pytest.mark.parametrize("name", ZOO)
def test_the_groups_of_understood_layers_make_up_the_network(name):
    seen = inspected(name)
    assert sum(group.macs for group in seen.groups) == seen.cost.macs
    assert sum(group.parameters for group in seen.groups) == seen.cost.parameters
    assert sum(group.macs_share for group in seen.groups) == pytest.approx(1)
    assert sum(group.parameters_share for group in seen.groups) == pytest.approx(1)


def test_what_is_left_with_one_channel_per_layer():
    seen = inspected("plain")
    # for every value a batch norm multiplies and adds, and a ReLU looks at its sign
    assert seen.least == Cost(64 * 27 + 16 * 9 + 4, (27 + 2) + (9 + 2) + (4 + 4), elementwise=3 * (64 + 16))
    assert seen.macs_locked == pytest.approx(1876 / 17312)
    assert seen.parameters_locked == pytest.approx(48 / 658)


def test_locked_channels_stay():
    seen = inspected("unknown")
    # the first group goes down to one channel, the second is locked, the third is returned
    assert seen.least.macs == 64 * 27 + 64 * 6 + 64 * 6 * 4
    assert seen.macs_locked == pytest.approx(seen.least.macs / seen.cost.macs)


def test_edges_follow_the_layers():
    assert edges(inspected("plain")) == {("0.0.0", "0.2.0"), ("0.2.0", "2")}
    seen = inspected("residual")
    # a.1.0 writes into the stem's channels; the shortcut and the second block make one group, named after the first
    assert edges(seen) == {
        ("stem.0", "a.0.0"),
        ("a.0.0", "stem.0"),
        ("stem.0", "skip.0"),
        ("stem.0", "b.0.0"),
        ("b.0.0", "skip.0"),
        ("skip.0", "head"),
    }
    assert ("stem.0", "stem.0") in edges(inspected("shared"))
    assert edges(recoup.inspect(AddedTwins(), torch.randn(1, 4))) == {("a", "b"), ("b", "head")}


def test_inputs_and_outputs():
    seen = inspected("concat")
    assert (seen.inputs, seen.outputs) == (("a.0", "b.0"), ("mix",))
    seen = inspected("several")
    assert (seen.inputs, seen.outputs) == (("a",), ("c", "out"))


def test_json_has_everything():
    seen = inspected("residual")
    data = json.loads(json.dumps(seen.to_json()))
    least = seen.least
    assert data["least"] == {**asdict(least), "flops": least.macs + least.elementwise}
    assert data["edges"][0] == {"source": seen.edges[0].source, "target": seen.edges[0].target}
    assert data["inputs"] == ["stem.0"] and data["outputs"] == ["head"]
    assert data["macs_locked"] == seen.macs_locked and data["parameters_locked"] == seen.parameters_locked
    assert data["groups"][0]["parameters"] == seen.groups[0].parameters
    assert data["groups"][0]["macs_share"] == seen.groups[0].macs_share
    assert data["groups"][0]["parameters_share"] == seen.groups[0].parameters_share


def test_text_has_macs_parameters_and_what_stays():
    lines = str(inspected("plain")).splitlines()
    assert " ".join(f"{lines[0]} {lines[1]}".split()) == (
        "Sequential: 17,312 MACs, 18,848 FLOPs, 658 parameters, 2 of 3 groups prunable; 10.8% of the MACs and 7.3% of "
        "the parameters stay whatever is pruned"
    )
    assert " ".join(lines[3].split()) == "0.0.0 6 10.4 k ( 59.9%) 174 ( 26.4%) free"
    assert lines[5].endswith("locked [1, 2]")
    assert lines[6:] == ["  [1] the model returns it.", "  [2] no layer reads it."]


class Softmaxes(nn.Module):
    """Two convolutions whose channels a softmax mixes, in modules of long names and an operation nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.a_name_that_is_longer_than_its_column = nn.Conv2d(3, 6, 1)
        self.b, self.head = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        for layer in (self.a_name_that_is_longer_than_its_column, self.b):
            x = layer(x).softmax(1)
        x = self.head(x)
        values, places = nn.functional.max_pool2d(self.b(x.repeat(1, 2, 1, 1)[:, :6]), 2, return_indices=True)
        return self.head(nn.functional.max_unpool2d(values, places, 2))


def test_a_reason_is_told_once_with_its_line_and_what_to_do_in_80_columns():
    text = str(recoup.inspect(Softmaxes(), torch.randn(2, 3, 4, 4)))
    flat = " ".join(text.split())
    line = Softmaxes.forward.__code__.co_firstlineno + 2
    assert max(map(len, text.splitlines())) <= 80
    assert flat.count("softmax in forward runs over channels") == 1
    assert f"softmax in forward runs over channels (test_inspection.py:{line})." in flat
    unknown = f"max_unpool2d in forward is not understood (test_inspection.py:{line + 3})."
    assert f"{unknown} Write it with other operations, or add a rule for it (CONTRIBUTING.md)" in flat


def test_no_group_and_no_cost():
    empty = Inspection("Net", Cost(0, 0), Cost(0, 0), (), (), (), ())
    assert (empty.prunable, empty.macs_locked, empty.parameters_locked) == (0, 0.0, 0.0)
    assert str(empty).startswith("Net: 0 MACs") and empty._repr_svg_().startswith("<svg")


def test_the_picture_is_saved_once(tmp_path):
    seen, path = inspected("plain"), tmp_path / "new" / "groups.svg"
    assert seen.save_picture(path) == path
    assert path.read_text(encoding="utf-8") == seen._repr_svg_()
    assert [found.name for found in path.parent.iterdir()] == ["groups.svg"]
    path.write_text("mine")
    with pytest.raises(ArtefactError, match="groups.svg exists already.*nothing was overwritten"):
        seen.save_picture(path)
    assert path.read_text() == "mine"


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(ArtefactError, match="cannot write .*No space left"):
        inspected("plain").save_picture(tmp_path / "groups.svg")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtefactError, match="cannot write .*file is not a folder"):
        inspected("plain").save_picture(str(tmp_path / "file" / "groups.svg"))
    with pytest.raises(ArtefactError, match="cannot write .*File name too long"):
        inspected("plain").save_picture(tmp_path / f"{'x' * 245}.svg")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    with pytest.raises(UsageError, match=r"groups\.png is not the name of an SVG file"):
        inspected("plain").save_picture(tmp_path / "groups.png")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_499, "999 k"), (999_500, "1.00 M"), (3_034_368, "3.03 M")],
)
def test_short_numbers(number, text):
    assert short(number) == text
