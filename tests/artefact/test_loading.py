"""What was saved is what is loaded: modes, dtypes, classes of outputs, and models that were changed in between."""

import collections
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree

import recoup
from recoup.artefact import samples as samples_module
from recoup.errors import ArtefactError
from tests.hostile.artefact_folders import HALF, Layered, Shuffled, flat


def pruned(model, batch=None):
    torch.manual_seed(0)
    batch = torch.randn(24, 3, 6, 6) if batch is None else batch
    return recoup.prune(model, [batch], budget=HALF, method="paper")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("build", [Layered, Shuffled])
@pytest.mark.parametrize("training", [True, False])
def test_a_result_comes_back_in_the_mode_it_was_saved_in(tmp_path, build, training):
    result = pruned(build().train(training))
    again = recoup.load(result.save(tmp_path / "out"), lambda: build().train(not training))
    assert {module.training for module in again.modules()} == {training}


def test_a_module_in_a_mode_of_its_own_keeps_it(tmp_path):
    result = pruned(Layered().eval())
    result.model.train()
    result.model.n.eval()
    again = recoup.load(result.save(tmp_path / "out"), Layered)
    assert {name for name, module in again.named_modules() if not module.training} == {"n"}


class Up(nn.Module):
    """Transposed convolutions without biases, which pruning gives them."""

    def __init__(self):
        super().__init__()
        self.a, self.u = nn.ConvTranspose2d(3, 12, 4, bias=False), nn.ConvTranspose2d(12, 8, 4, 2, 1, bias=False)
        self.n, self.c = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 2, 3, bias=False)

    def forward(self, x):
        return self.c(F.relu(self.n(self.u(F.relu(self.a(x))))))


def test_a_bias_that_a_transposed_convolution_got(tmp_path):
    result = pruned(Up().eval())
    again = recoup.load(result.save(tmp_path / "out"), Up)
    assert result.model.u.bias is not None and not again.training
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(again(x), result.model(x))


@pytest.mark.parametrize("build", [Layered, Shuffled])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_result_in_another_precision(tmp_path, build, dtype):
    result = pruned(build().eval())
    result.model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", recoup.RecoupWarning)
        folder = result.save(tmp_path / "out")
    again = recoup.load(folder, build)
    assert {p.dtype for p in again.parameters()} == {dtype}
    x = torch.randn(2, 3, 6, 6, dtype=dtype)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(flat(again(x)), flat(result.model(x)), strict=True))
    assert recoup.load(folder, lambda: build().half()).state_dict().keys() == again.state_dict().keys()


def test_what_was_trained_or_frozen_after_pruning_comes_back_so(tmp_path):
    result = pruned(Layered().eval())
    result.model.a.requires_grad_(False)
    with torch.no_grad():
        result.model.head.bias.add_(1.0)
    again = recoup.load(result.save(tmp_path / "out"), Layered)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in result.model.parameters()]
    assert torch.equal(again.head.bias, result.model.head.bias)


def test_a_model_that_no_longer_takes_the_samples_is_saved_with_a_warning(tmp_path):
    result = pruned(Layered().eval())
    result.model.a = nn.Conv2d(5, result.model.a.out_channels, 3)
    with pytest.warns(recoup.RecoupWarning, match="without samples to check it by.*does not run on the calibration"):
        folder = result.save(tmp_path / "out")
    assert manifest_of(folder)["unchecked"] and not (folder / "samples.safetensors").exists()
    with pytest.raises(ArtefactError, match="does not fit the model"):
        recoup.load(folder, Layered)


def test_saving_and_loading_leave_a_state_and_the_callers_hooks_alone(tmp_path):
    class Counting(Layered):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    result = pruned(Counting().eval())
    result.model.calls.zero_()
    called = []
    result.model.register_forward_hook(lambda *_: called.append(1))
    again = recoup.load(result.save(tmp_path / "out"), Counting)
    assert (float(result.model.calls), float(again.calls), called) == (0.0, 0.0, [])


def test_few_samples_are_stored_and_fewer_of_large_ones(tmp_path, monkeypatch):
    result = pruned(Layered().eval())
    assert result.samples.size == 4
    assert manifest_of(result.save(tmp_path / "a"))["tolerance"] == 1e-4
    monkeypatch.setattr(samples_module, "STORED_BYTES", 2 * (3 * 6 * 6 + 4) * 4)
    taken = samples_module.take_samples(result.model, result.samples)
    assert [len(value) for value in taken.tensors.values()] == [2, 2]
    monkeypatch.setattr(samples_module, "ONE_SAMPLE_BYTES", 10)
    monkeypatch.setattr(samples_module, "STORED_BYTES", 10)
    assert samples_module.take_samples(result.model, result.samples) == "one sample takes too much room"


def test_a_difference_of_rounding_is_allowed_and_any_other_is_not():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 10, generator=generator)
    outputs[:, 0] = -1e9  # as a mask leaves it: the others are not to be hidden behind it
    shaken = outputs * (1 + 1e-6 * torch.randn(4, 10, generator=generator))
    wrong = outputs.clone()
    wrong[2, 3] += 0.01
    assert samples_module._difference([outputs], [shaken], 1e-4) == ""
    assert "output 0 differs" in samples_module._difference([outputs], [wrong], 1e-4)
    assert "differs" in samples_module._difference([outputs], [outputs.index_fill(0, torch.tensor(1), torch.nan)], 1e-4)
    assert "returns 2 tensors" in samples_module._difference([outputs], [outputs, outputs], 1e-4)
    whole = torch.arange(10)
    assert samples_module._difference([whole], [whole.flip(0)], 1e-4)
    assert samples_module._difference([whole], [whole.clone()], 1e-4) == ""


Named = collections.namedtuple("Named", ["scores", "parts"])


class Output(collections.OrderedDict):
    """As Hugging Face's: a dict with attributes that torch knows how to flatten."""

    def __init__(self, **parts):
        super().__init__(parts)
        self.__dict__.update(parts)


_pytree.register_pytree_node(
    Output,
    lambda o: (list(o.values()), list(o.keys())),
    lambda parts, keys: Output(**dict(zip(keys, parts, strict=True))),
)


@pytest.mark.parametrize(("cls", "plain"), [(Named, tuple), (Output, dict)])
def test_a_class_of_outputs_comes_back_if_it_is_handed_over(tmp_path, cls, plain):
    class Packed(Shuffled):
        def forward(self, x):
            return cls(**super().forward(x))

    result = pruned(Packed().eval())
    folder = result.save(tmp_path / "out")
    x = torch.randn(2, 3, 6, 6)
    with pytest.warns(
        recoup.RecoupWarning, match=f"of the class .*:{cls.__name__} comes back as a plain dict or tuple"
    ):
        loose = recoup.load(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", recoup.RecoupWarning)
        again = recoup.load(folder, classes=(cls,))
    with torch.no_grad():
        assert type(loose(x)) is plain and type(again(x)) is cls
        assert torch.equal(again(x).scores, result.model(x).scores)
        assert torch.equal(flat(loose(x))[0], result.model(x).scores)


def test_a_class_that_cannot_hold_what_was_saved(tmp_path):
    class Packed(Shuffled):
        def forward(self, x):
            return Named(**super().forward(x))

    folder = pruned(Packed().eval()).save(tmp_path / "out")
    other = type("Named", (), {"__module__": Named.__module__, "__init__": lambda self, *parts: None})
    with pytest.raises(ArtefactError, match="Named cannot hold what was saved"):
        recoup.load(folder, classes=(other,))


def test_an_operator_that_may_not_be_loaded_is_not_saved(tmp_path):
    class Bagged(Shuffled):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(4, 4)

        def forward(self, x):
            scores = super().forward(x)["scores"]
            return scores + self.bag(scores.argmax(1, keepdim=True))

    result = pruned(Bagged().eval())
    with pytest.raises(ArtefactError, match="embedding_bag.* is none that a saved graph may hold.*keep_class=True"):
        result.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_loaded_model_does_not_depend_on_its_files(tmp_path):
    result = pruned(Shuffled().eval())
    folder = result.save(tmp_path / "out")
    again = recoup.load(folder)
    data = (folder / "model.safetensors").read_bytes()
    with (folder / "model.safetensors").open("r+b") as file:  # in place, as a careless copy does
        file.write(bytes(len(data)))
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(again(x)["scores"], result.model(x)["scores"])
        next(again.parameters()).zero_()
    assert (folder / "model.safetensors").read_bytes() == bytes(len(data))
