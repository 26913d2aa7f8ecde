"""What a folder from a stranger may try, one trick at a time, and a few mutants; `python -m tests.hostile` has more."""

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import recoup
from recoup.artefact.files import FORMAT
from recoup.artefact.graph_json import _checks
from recoup.artefact.schema import MisfitError
from recoup.errors import ArtefactError
from tests.hostile import artefact_run
from tests.hostile.artefact_folders import Layered, Shuffled, change, rehash, save_all
from tests.hostile.artefact_mutants import restore


@pytest.fixture(scope="module")
def all_saved(tmp_path_factory):
    return {saved.folder.name: saved for saved in save_all(tmp_path_factory.mktemp("saved"))}


@pytest.fixture
def graph(all_saved):
    restore(all_saved["shuffled"])
    return all_saved["shuffled"]


@pytest.fixture
def layered(all_saved):
    restore(all_saved["layered"])
    return all_saved["layered"]


@pytest.fixture
def mark(tmp_path):
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


def test_mutants_load_right_or_are_refused():
    tally = artefact_run.run(150, seed=7)
    assert tally.wrong == []
    assert tally.counts[artefact_run.RIGHT] > 5 and tally.counts[artefact_run.REFUSED] > 100


def test_a_mutant_that_loads_wrong_would_be_seen(layered):
    """The law is no empty one: other weights under a manifest that fits them are not taken for the saved ones."""
    size = struct.unpack("<Q", layered.files["model.safetensors"][:8])[0]
    data = bytearray(layered.files["model.safetensors"])
    data[8 + size + 64 : 8 + size + 128] = struct.pack("<16f", *range(16))
    (layered.folder / "model.safetensors").write_bytes(bytes(data))
    rehash(layered.folder)
    assert not layered.is_right(layered.load(check=False))
    with pytest.raises(ArtefactError, match=r"does not do what the saved one did.*output 0 differs"):
        layered.load()


def node(graph, target):
    return next(entry for entry in graph["nodes"] if entry["target"].startswith(target))


def code(mark):
    return f"__import__('os').system('touch {mark}')"


TRICKS = {
    "argument name": (lambda g, m: g["names"].append(f"y={code(m)}"), r"names\[1\] should be a plain identifier"),
    "node name": (lambda g, m: g["nodes"][2].update(name=f"y={code(m)}"), "should be a plain identifier"),
    "keyword": (lambda g, m: g["nodes"][-2]["kwargs"].update({f"y={code(m)}": 1}), "should be a plain identifier"),
    "placeholder": (lambda g, m: node(g, "x").update(target=f"x={code(m)}"), "should be a plain identifier"),
    "dunder": (lambda g, m: g["nodes"][2].update(name="__class__"), "should be a plain identifier"),
    "tensor name": (
        lambda g, m: node(g, "a.weight").update(target=f'a"), {code(m)}, ("'),
        "should be a dotted name",
    ),
    "tensor of python": (lambda g, m: node(g, "a.weight").update(target="a.__class__"), "should be a dotted name"),
    "tensor that is none": (lambda g, m: node(g, "a.weight").update(target="forward"), "should be about one of the"),
    "defaultdict": (
        lambda g, m: g.update(outputs={"type": "collections.defaultdict", "context": "int"}),
        "a tree of .* tuple, list and dict",
    ),
    "pytree text": (lambda g, m: g.update(outputs='[1, {"type": "enum.Enum"}]'), "outputs should be a tree"),
    "from_file": (
        lambda g, m: node(g, "aten.relu.").update(target="aten.from_file.default", args=[str(m), True, 10]),
        "aten.from_file.default, which no saved graph may",
    ),
    "set_": (lambda g, m: node(g, "aten.relu.").update(target="aten.set_.source_Tensor"), "which no saved graph may"),
    "resize_": (lambda g, m: node(g, "aten.relu.").update(target="aten.resize_.default"), "which no saved graph may"),
    "out=": (lambda g, m: node(g, "aten.relu.").update(target="aten.relu.out"), "which no saved graph may"),
    "of python": (lambda g, m: node(g, "aten.relu.").update(target="os.system"), r"operators=\('os',\)"),
    "of a library": (
        lambda g, m: node(g, "aten.relu.").update(target="torchvision.nms.default"),
        r"pass operators=\('torchvision',\)",
    ),
    "no overload": (lambda g, m: node(g, "aten.relu.").update(target="aten.relu"), "has no operation aten.relu"),
    "class of an operator": (
        lambda g, m: node(g, "aten.relu.").update(target="aten.relu.__class__"),
        "has no operation",
    ),
    "call_module": (lambda g, m: g["nodes"][4].update(op="call_module"), "should be one of placeholder, get_attr"),
    "dtype": (lambda g, m: g["nodes"][-2]["kwargs"].update(dtype={"dtype": "load"}), "should be one of float64"),
    "layout": (
        lambda g, m: g["nodes"][-2]["kwargs"].update(layout={"layout": "sparse_coo"}),
        "should be one of strided",
    ),
    "device": (lambda g, m: g["nodes"][-2]["kwargs"].update(device={"device": "meta"}), "should be one of cpu"),
    "later node": (lambda g, m: g["nodes"].insert(3, g["nodes"].pop()), "output for the last node and no other"),
    "unknown node": (lambda g, m: g["nodes"][-1].update(args=[[{"node": "x" * 9}]]), "a node before this one"),
    "same name": (lambda g, m: g["nodes"].insert(1, g["nodes"][0]), "should be new"),
    "huge size": (
        lambda g, m: node(g, "aten.relu.").update(target="aten.zeros.default", args=[[9_000_000_000]]),
        "cannot be checked on the samples",
    ),
    "much memory": (
        lambda g, m: g["nodes"][-2].update(target="aten.new_zeros.default", args=[{"node": "x"}, [10**9]], kwargs={}),
        "would take 381[0-9] MB of memory",
    ),
    "power": (
        lambda g, m: node(g, "aten.relu.").update(target="operator.pow", args=[10, 10**18]),
        "raises to the power",
    ),
    "long list": (
        lambda g, m: node(g, "aten.relu.").update(target="operator.mul", args=[[1, 2], 10**12]),
        "computes with something else than numbers",
    ),
    "parameter": (
        lambda g, m: node(g, "aten.relu.").update(
            target="aten.fill_.Scalar", args=[{"node": g["nodes"][0]["name"]}, 1.0]
        ),
        "should be one that leaves parameters alone",
    ),
    "format": (lambda g, m: g.update(format=2), f"has format 2, this version reads {FORMAT}"),
    "no output": (lambda g, m: g["nodes"].pop(), "output for the last node"),
    "fewer outputs": (lambda g, m: g.update(outputs={"tuple": ["*"]}), "a leaf for each result"),
    "fewer inputs": (
        lambda g, m: g.update(inputs={"tuple": [{"tuple": []}, {"dict": []}]}),
        "one for each placeholder",
    ),
}


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_of_a_graph(graph, mark, name):
    trick, said = TRICKS[name]
    change(graph.folder, "graph.json", lambda content: trick(content, mark) and None)
    with pytest.raises(ArtefactError, match=said):
        graph.load()


PLANS = {
    "huge width": (lambda p: next(iter(p["keep"].values())).update(width=9_000_000_000), "should be an integer from 0"),
    "many channels": (
        lambda p: p.update(keep={str(k): {"width": 9_000_000, "kept": []} for k in range(3)}),
        "at most 10000000 channels in all",
    ),
    "out of range": (lambda p: p["slices"][0].update(kept=[0, 10**6]), r"slices\[0\].kept should be places from 0 to"),
    "runs of no size": (lambda p: p["slices"][0].update(runs=7), r"slices\[0\].runs should be equal parts of the"),
    "twice": (lambda p: p["slices"].append(p["slices"][0]), "the only one for its tensor and dim"),
    "not ascending": (lambda p: p["slices"][0].update(kept=[1, 1]), "should be an integer above 1"),
    "flag for a number": (lambda p: p["slices"][0].update(dim=True), "should be an integer from 0 to 15, and is True"),
    "no such dim": (lambda p: p["slices"][0].update(dim=9), "about a dim of a tensor"),
    "attribute": (lambda p: p.update(shapes={"__class__": [1]}, slices=[]), "whose __class__ has shape"),
    "new attribute": (lambda p: p["added"].update({"forward": [4]}), "no layer that lacks forward"),
    "large bias": (lambda p: p.update(slices=[], added={"u.bias": [2**40]}), "not the number of its layer's outputs"),
    "nesting": (lambda p: p.update(shapes={"a.weight": [[[[1]]]]}), "should be an integer"),
    "unknown field": (lambda p: p.update(more=1), "an object with the fields"),
    "text for a list": (lambda p: p.update(slices="all"), "slices should be a list"),
}


@pytest.mark.parametrize("name", PLANS)
def test_tricks_of_a_plan(layered, name):
    trick, said = PLANS[name]
    change(layered.folder, "plan.json", lambda content: trick(content) and None)
    with pytest.raises(ArtefactError, match=said):
        layered.load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": NaN}', "NaN is no number"),
        ('{"format": -Infinity}', "-Infinity is no number"),
        ('{"format": 1e999}', "too large"),
        ('{"format": ' + "9" * 5000 + "}", "more than 64 bits"),
        ('{"format": 3, "format": 3}', "a key stands twice"),
        ("[" * 100_000, "is damaged"),
        ("[" * 60 + "]" * 60, "nested more than 40 levels deep"),
        ("\ufeff{}", "is damaged"),
    ],
)
def test_json_that_python_would_take(layered, text, said):
    (layered.folder / "plan.json").write_text(text)
    rehash(layered.folder)
    with pytest.raises(ArtefactError, match=said):
        layered.load()


@pytest.mark.parametrize("name", ["plan.json", "graph.json", "manifest.json"])
def test_a_file_of_a_terabyte_that_holds_nothing(graph, name):
    with (graph.folder / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtefactError, match=f"{name} is larger than 32 MB"):
        graph.load(check=False)


def test_a_pipe_does_not_hang(graph):
    (graph.folder / "graph.json").unlink()
    os.mkfifo(graph.folder / "graph.json")
    with pytest.raises(ArtefactError, match="graph.json is no regular file"):
        graph.load(check=False)


def test_a_link_may_not_lead_out(graph, tmp_path):
    shutil.move(graph.folder / "plan.json", tmp_path / "plan.json")
    (graph.folder / "plan.json").symlink_to(tmp_path / "plan.json")
    with pytest.raises(ArtefactError, match="a link that leads out of the folder"):
        graph.load(check=False)


def test_operators_of_a_library_the_caller_allows(tmp_path):
    library = torch.library.Library("hostile_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")

    class Doubled(Shuffled):
        def forward(self, x):
            return torch.ops.hostile_tests.twice(super().forward(x)["scores"])

    torch.manual_seed(0)
    result = recoup.prune(Doubled().eval(), [torch.randn(24, 3, 6, 6)], budget=recoup.Budget(width=0.5), method="paper")
    folder = result.save(tmp_path / "out")
    with pytest.raises(ArtefactError, match=r"hostile_tests.twice.default.*pass operators=\('hostile_tests',\)"):
        recoup.load(folder)
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(recoup.load(folder, operators=("hostile_tests",))(x), result.model(x))


class Squared(Layered):
    """Layers of the same shapes that do something else."""

    def forward(self, x):
        return super().forward(x).square()


def test_another_class_of_the_same_shapes(layered):
    with pytest.raises(ArtefactError, match=r"was made from the class .*:Layered, and this model is .*:Squared"):
        recoup.load(layered.folder, Squared)
    renamed = type("Layered", (Squared,), {"__module__": Layered.__module__})  # as a class that was changed since
    with pytest.raises(ArtefactError, match="does not do what the saved one did"):
        recoup.load(layered.folder, renamed)


@pytest.mark.parametrize("name", ["model.safetensors", "samples.safetensors", "report.html", "plan.json"])
def test_a_flipped_bit(layered, name):
    data = bytearray(layered.files[name])
    data[len(data) * 2 // 3] ^= 1
    (layered.folder / name).write_bytes(bytes(data))
    with pytest.raises(ArtefactError, match=f"{name} is damaged: it is not the file that was saved"):
        layered.load()


def test_a_flipped_bit_of_the_manifest(layered):
    text = (layered.folder / "manifest.json").read_text().replace('"finite": true', '"finite": false', 1)
    (layered.folder / "manifest.json").write_text(text)
    with pytest.raises(ArtefactError, match="manifest.json is damaged"):
        layered.load()


def test_a_file_too_few_and_one_too_many(layered):
    (layered.folder / "evil.py").write_text("")
    with pytest.raises(ArtefactError, match="evil.py is none of the files that were saved. Remove it"):
        layered.load()
    (layered.folder / "evil.py").unlink()
    (layered.folder / "report.html").unlink()
    with pytest.raises(ArtefactError, match="report.html is missing"):
        layered.load()
    (layered.folder / "manifest.json").unlink()
    with pytest.raises(ArtefactError, match="manifest.json is missing"):
        layered.load()


def test_a_folder_of_an_earlier_version(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"format": 2, "recoup": "0.2.0"}))
    with pytest.raises(
        ArtefactError, match=rf"has format 2, this version reads {FORMAT}. Install the version .* \(0.2.0\)"
    ):
        recoup.load(tmp_path, nn.Linear(1, 1))


def test_tensors_that_are_not_finite_or_of_another_type(layered):
    path = layered.folder / "model.safetensors"
    tensors = load_file(path)
    for other in (tensors["a.weight"].index_fill(0, torch.tensor([0]), torch.nan), tensors["a.weight"].double()):
        save_file({**tensors, "a.weight": other}, path)
        rehash(layered.folder)
        with pytest.raises(
            ArtefactError, match="a.weight differ from the manifest, in name, dtype or shape, or are no"
        ):
            layered.load()


@pytest.mark.parametrize("named", [[], {}, 3, None])
def test_a_condition_about_something_that_is_no_name_is_refused(named):
    """Found by mutants: a list in the place of an input's name could not be looked up."""
    with pytest.raises(MisfitError, match="about one of the graph's inputs"):
        _checks([["size", named, 0]], {"x"})
