"""Defects of training that were found in use: each test failed once."""

import copy
import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import recoup
from recoup.errors import ArtefactError, CalibrationError, TrainingError, UsageError
from recoup.training.tensors import digest
from tests.training.test_finetune import QUICK, StoppedError, bits, data, net, same, stop_at
from tests.zoo import seeded

PLAIN = recoup.Training(epochs=2, rate=0.05)


class Dense(nn.Module):
    """Scores of every position."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.conv(x)


class Named(nn.Module):
    """Scores in a dict."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))

    def forward(self, x):
        return {"logits": self.net(x)}


def maps():
    return [(images, labels[:, None, None].expand(-1, 6, 6)) for images, labels in data()]


@pytest.mark.parametrize("augment", ["flip", "crop"])
def test_images_do_not_move_under_labels_of_positions(augment):
    training = dataclasses.replace(PLAIN, augment=augment)
    with pytest.raises(UsageError, match=r"augment='\w+' moves images, but not labels of their positions"):
        recoup.finetune(Dense(), maps(), training)
    with pytest.raises(UsageError, match="Say augment='none', or loss='distillation'"):
        recoup.finetune(Dense(), maps(), dataclasses.replace(training, loss="both"), teacher=Dense())
    recoup.finetune(Dense(), maps(), dataclasses.replace(training, loss="distillation"), teacher=Dense())
    recoup.finetune(Dense(), maps(), PLAIN)


def taught(path, *, resume=False, model=None, teacher=None, batches=None):
    training = dataclasses.replace(QUICK, loss="both")
    return recoup.finetune(
        model or net(), batches or data(), training, teacher=teacher or net(), checkpoint=path, resume=resume
    )


def test_a_checkpoint_knows_teacher_data_and_what_trains(tmp_path):
    path = tmp_path / "c"
    taught(path)
    before = path.read_bytes()
    with seeded(5), pytest.raises(ArtefactError, match="a run with another teacher"):
        taught(path, resume=True, teacher=type(net())())
    frozen = net()
    frozen.head.requires_grad_(False)
    with pytest.raises(ArtefactError, match=r"other parameters: head.bias, head.weight frozen now\. Set requires_grad"):
        taught(path, resume=True, model=frozen)
    thawed = net()
    thawed.scale.requires_grad_(True)
    with pytest.raises(ArtefactError, match=r"other parameters: scale trained now\."):
        taught(path, resume=True, model=thawed)
    with pytest.raises(ArtefactError, match="other numbers, or come in another order"):
        taught(path, resume=True, batches=data()[::-1])
    with pytest.raises(ArtefactError, match="other numbers, or come in another order"):
        taught(path, resume=True, batches=[(images, labels.flip(0)) for images, labels in data()])
    larger = [(torch.zeros(24, 3, 8, 8), labels) for _, labels in data()]
    with pytest.raises(
        ArtefactError, match=r"first batch was input 1 float32 \(24, 3, 6, 6\), labels int64 \(24,\) and"
    ):
        taught(path, resume=True, batches=larger)
    assert path.read_bytes() == before
    taught(path, resume=True, batches=tuple(data()))


def test_of_a_loader_only_the_form_counts(tmp_path):
    """It may shuffle by a generator of its own, so that its first batch is another every time."""
    images, labels = (torch.cat(parts) for parts in zip(*data(), strict=True))

    def loader(images):
        kept = torch.utils.data.TensorDataset(images, labels)
        return torch.utils.data.DataLoader(kept, 24, shuffle=True, generator=torch.Generator())

    path, own = tmp_path / "c", loader(images)
    with pytest.raises(StoppedError):
        recoup.finetune(net(), own, QUICK, checkpoint=path, progress=stop_at(6))
    assert len(recoup.finetune(net(), own, QUICK, checkpoint=path, resume=True).history) == 3
    with pytest.raises(ArtefactError, match="on other data: the first batch was"):
        recoup.finetune(net(), loader(images.repeat(1, 1, 2, 2)), QUICK, checkpoint=path, resume=True)


def test_batches_of_changing_shape_that_shuffle_resume(tmp_path):
    class Padded:
        def __len__(self):
            return 4

        def __iter__(self):
            for images, labels in data():
                yield torch.nn.functional.pad(images, [0, int(torch.randint(5, ()))]), labels

    path = tmp_path / "c"
    with pytest.raises(StoppedError):
        recoup.finetune(net(), Padded(), QUICK, checkpoint=path, progress=stop_at(6))
    rest = recoup.finetune(net(), Padded(), QUICK, checkpoint=path, resume=True)
    assert same(bits(rest.model), bits(recoup.finetune(net(), Padded(), QUICK).model))


def test_checkpoints_of_the_format_before_are_named_as_such(tmp_path):
    path = tmp_path / "c"
    recoup.finetune(net(), data(), QUICK, checkpoint=path)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    run = {name: facts["run"][name] for name in ("settings", "steps", "start")}
    text = json.dumps({**facts, "format": 1, "run": run})
    save_file(tensors, path, {"facts": text, "sha256": digest(text, tensors)})
    with pytest.raises(ArtefactError, match="has format 1, this version reads 2. Remove the file to begin anew"):
        recoup.finetune(net(), data(), QUICK, checkpoint=path, resume=True)


def test_weights_that_the_last_step_spoils_are_not_kept(tmp_path):
    class Spoilt(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.head = nn.Flatten(), nn.Linear(108, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))  # on purpose, as in attention

        def forward(self, x):
            if self.training:
                self.calls += 1
                if self.calls == 8:
                    self.head.weight.register_hook(lambda gradient: gradient * float("inf"))
            return self.head(self.flat(x))

    path = tmp_path / "c"
    with pytest.raises(TrainingError, match=r"head.weight holds NaN or infinite values after epoch 2\. Lower the rate"):
        recoup.finetune(Spoilt(), data(), PLAIN, checkpoint=path)
    with safe_open(path, framework="pt") as file:
        assert bool(file.get_tensor("model.head.weight").isfinite().all())
        assert len(json.loads(file.metadata()["facts"])["history"]) == 1


def test_no_gradient_reaches_what_made_the_inputs():
    encoder = nn.Conv2d(3, 3, 1)
    made = [(encoder(images), labels) for images, labels in data()]
    plain = [(images.detach(), labels) for images, labels in made]
    trained = recoup.finetune(net(), made, PLAIN)
    assert encoder.weight.grad is None and encoder.bias.grad is None
    assert same(bits(trained.model), bits(recoup.finetune(net(), plain, PLAIN).model))


def test_the_cpu_waits_for_what_comes_to_it(monkeypatch):
    """From a GPU it would read before all has come."""
    asked, move = [], torch.Tensor.to

    def spy(self, *args, **kwargs):
        asked.append(kwargs.get("non_blocking", False))
        return move(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", spy)
    recoup.finetune(net(), data(), PLAIN)
    assert asked and not any(asked)


def test_a_captured_average_of_all_and_none_at_all_look_alike():
    """So the guide names the exception; if torch ever tells them apart, so can we."""
    found = []
    for momentum in (None, 0.0):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=momentum)).eval()
        graph = torch.export.export(model, (torch.rand(2, 3, 4, 4),)).graph
        found += [node.args[5:] for node in graph.nodes if "batch_norm" in str(node.target)]
    assert len(found) == 2 and found[0] == found[1]


@pytest.mark.parametrize(
    ("model", "said"), [(Named, "returned dict"), (Dense, r"returned a tensor of shape \(24, 4, 6")]
)
def test_what_accuracy_cannot_read_is_refused_before_the_first_epoch(model, said):
    steps = []
    with pytest.raises(CalibrationError, match=f"validation measures accuracy.*{said}") as caught:
        recoup.finetune(
            model(),
            maps() if model is Dense else data(),
            PLAIN,
            validation=data(),
            progress=lambda *step: steps.append(step),
        )
    assert "evaluate" not in str(caught.value) and not steps


def test_validation_without_labels_is_refused_before_the_first_epoch():
    steps = []
    with pytest.raises(CalibrationError, match="validation batch 1 has no labels.*leave validation= out") as caught:
        images = [images for images, _ in data()]
        recoup.finetune(net(), data(), PLAIN, validation=images, progress=lambda *step: steps.append(step))
    assert "evaluate" not in str(caught.value) and not steps


def test_an_epoch_is_kept_before_it_is_measured(tmp_path):
    path = tmp_path / "c"
    broken = [*data(), (data()[0][0], torch.full((24,), 9))]
    with pytest.raises(CalibrationError, match="validation batch 5 go from 9 to 9"):
        recoup.finetune(net(), data(), QUICK, validation=broken, checkpoint=path)
    with safe_open(path, framework="pt") as file:
        assert len(json.loads(file.metadata()["facts"])["history"]) == 1
    rest = recoup.finetune(net(), data(), QUICK, validation=data(), checkpoint=path, resume=True)
    whole = recoup.finetune(net(), data(), QUICK, validation=data())
    assert same(bits(rest.model), bits(whole.model))
    assert [epoch.accuracy for epoch in rest.history] == [epoch.accuracy for epoch in whole.history]


def test_numbers_of_any_kind_are_kept_as_floats(tmp_path):
    training = recoup.Training(
        epochs=1, rate=np.float32(0.01), momentum=np.float64(0.5), decay=0, warm_up=Fraction(1, 4)
    )
    for name in ("rate", "momentum", "decay", "warm_up", "smoothing", "temperature"):
        assert type(getattr(training, name)) is float
    recoup.finetune(net(), data(), training, checkpoint=tmp_path / "c")
    assert len(recoup.finetune(net(), data(), training, checkpoint=tmp_path / "c", resume=True).history) == 1


@pytest.mark.parametrize("fields", [{"rate": 10**400}, {"decay": 10**5000}, {"epochs": 10**5000}, {"seed": 10**5000}])
def test_numbers_beyond_a_float_are_refused(fields):
    with pytest.raises(UsageError, match=f"{next(iter(fields))} must be"):
        recoup.Training(**fields)


def test_labels_made_in_inference_mode_are_learnt():
    with torch.inference_mode():
        batches = [(images.clone(), labels.clone()) for images, labels in data()]
    assert batches[0][1].is_inference()
    found, expected = (recoup.finetune(net(), each, PLAIN).model for each in (batches, data()))
    assert same(bits(found), bits(expected))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(
    ("change", "said"), [(lambda y: y.to_sparse(), "are sparse.*to_dense"), (lambda y: y.to("meta"), "are on the meta")]
)
def test_labels_without_plain_values_are_refused(tmp_path, change, said, checkpoint):
    batches = [(images, change(labels)) for images, labels in data()]
    with pytest.raises(CalibrationError, match=f"labels of training batch 1 {said}"):
        recoup.finetune(net(), batches, PLAIN, checkpoint=tmp_path / "c" if checkpoint else None)


def test_labels_are_looked_at_in_every_epoch():
    class Drifting:
        reads = 0

        def __len__(self):
            return 4

        def __iter__(self):
            self.reads += 1
            return iter([(images, labels + 4 * (self.reads > 1)) for images, labels in data()])

    with pytest.raises(CalibrationError, match="training batch 1 go from 4 to 7, but the model has 4 scores"):
        recoup.finetune(net(), Drifting(), PLAIN)


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.zeros(2, dtype=torch.complex128), "note of the model is of torch.complex128"),
        (torch.eye(2).to_sparse(), "note of the model is sparse_coo"),
        (torch.zeros(1).expand(3), "note of the model is expanded"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_before_the_first_epoch(tmp_path, buffer, said):
    model, steps = net(), []
    model.register_buffer("note", buffer)
    with pytest.raises(ArtefactError, match=f"{said}.*train without checkpoint="):
        recoup.finetune(model, data(), PLAIN, checkpoint=tmp_path / "c", progress=lambda *step: steps.append(step))
    assert not steps
    assert len(recoup.finetune(model, data(), PLAIN).history) == 2


def test_a_teacher_and_buffers_of_other_kinds_may_have_a_checkpoint(tmp_path):
    model, teacher, path = net(), copy.deepcopy(net()), tmp_path / "c"
    model.register_buffer("note", torch.ones(2, dtype=torch.complex64).conj())
    teacher.register_buffer("note", torch.eye(2).to_sparse())
    taught(path, model=model, teacher=teacher)
    assert len(taught(path, model=model, teacher=teacher, resume=True).history) == 3


@pytest.mark.parametrize("name", ["a\0b", "n" * 300])
def test_what_can_be_no_path_is_refused(name):
    with pytest.raises(ArtefactError, match="cannot be reached.*Give the path of a file"):
        recoup.finetune(net(), data(), PLAIN, checkpoint=name)
