"""Training: it learns, is repeatable to the bit, resumes to the bit, and leaves the caller's things alone."""

import copy
import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import recoup
from recoup.errors import ArtefactError, CalibrationError, TrainingError, UsageError
from recoup.graph.standalone import Standalone
from recoup.inputs.augment import varied
from recoup.inputs.batches import Inputs
from recoup.training.loop import make_optimiser
from recoup.training.losses import on_labels, on_teacher
from tests.zoo import conv_bn, seeded

DOCS = Path(__file__).parents[2] / "docs"


class Net(nn.Module):
    """Batch norm, dropout, a frozen parameter and a buffer."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = conv_bn(3, width), conv_bn(width, width)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return self.head(self.drop(self.b(self.a(x)).mean((2, 3)))) * self.scale


class Fixed(Net):
    """Its code knows its width: results are standalone."""

    def forward(self, x):
        x = self.b(self.a(x))
        return self.head(self.drop(x.view(-1, 8, 36).mean(2)))


def net(kind=Net):
    with seeded(0):
        return kind().eval()


def data(count=96, size=24):
    with seeded(1):
        labels = torch.arange(count) % 4
        images = 0.3 * torch.randn(count, 3, 6, 6)
        images[:, 0] += labels[:, None, None].float() / 2
    return list(zip(images.split(size), labels.split(size), strict=True))


QUICK = recoup.Training(epochs=3, rate=0.05, augment="crop")


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def test_digits_are_learnt():
    datasets = pytest.importorskip("sklearn.datasets")
    bundle = datasets.load_digits()
    with seeded(0):
        order = torch.randperm(len(bundle.target))
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    images = torch.from_numpy(bundle.images).float().unsqueeze(1)[order] / 16
    batches = list(zip(images.split(100), torch.from_numpy(bundle.target)[order].split(100), strict=True))
    trained = recoup.finetune(model, batches[:14], recoup.Training(epochs=15, rate=0.2), validation=batches[14:])
    assert recoup.accuracy(model, batches[14:]) < 30
    assert trained.history[-1].accuracy == recoup.accuracy(trained.model, batches[14:]) > 94
    assert trained.history[-1].loss < 0.2 < trained.history[0].loss


@pytest.mark.parametrize(("optimiser", "smoothing"), [("sgd", 0.0), ("adamw", 0.0), ("sgd", 0.3)])
def test_a_step_is_torchs_own(optimiser, smoothing):
    """One epoch of two batches without anything random, against the loop that anybody would write."""
    with seeded(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, 4))
    training = recoup.Training(epochs=2, optimiser=optimiser, rate=0.1, warm_up=0.0, decay=0.01, smoothing=smoothing)
    batches = data(48)
    trained = recoup.finetune(model, batches, training)
    twin = copy.deepcopy(model)
    matrices, vectors = ([p for p in twin.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    if optimiser == "sgd":
        own = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    else:
        own = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999))
    losses = []
    for step, (images, labels) in enumerate([*batches, *batches]):
        for group in own.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * step / 4))
        own.zero_grad()
        loss = F.cross_entropy(twin(images), labels, label_smoothing=smoothing)
        loss.backward()
        own.step()
        losses.append(float(loss.detach()))
    assert same(bits(trained.model), bits(twin))
    assert [epoch.loss for epoch in trained.history] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert trained.history[-1].rate == pytest.approx(0.1 * 0.5 * (1 + np.cos(np.pi * 3 / 4)))


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine():
    training = recoup.Training(rate=0.2, warm_up=0.1)
    rates = [training.rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.02) and rates[4] == pytest.approx(0.1, rel=0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[10:])) and rates[-1] < 1e-3
    assert rates[9] == rates[10] == max(rates) == 0.2  # the highest rate is reached where the rise ends
    assert rates[55] == pytest.approx(0.1)
    for steps, share in itertools.product((1, 2, 7, 30), (0.0, 0.05, 0.3, 0.99)):
        each = [recoup.Training(rate=0.3, warm_up=share).rate_at(step, steps) for step in range(steps + 2)]
        assert max(each) == 0.3 and min(each) >= 0


def test_only_matrices_decay_and_the_frozen_are_left_out():
    decayed, others = make_optimiser(net(), recoup.Training(decay=0.3)).param_groups
    assert {p.dim() for p in decayed["params"]} == {2, 4} and decayed["weight_decay"] == 0.3
    assert {p.dim() for p in others["params"]} == {1} and others["weight_decay"] == 0.0


def test_the_divergence_is_that_of_softened_answers():
    with seeded(0):
        scores, target = torch.randn(2, 7, 5)
    expected = F.kl_div(F.log_softmax(scores / 3, 1), F.softmax(target / 3, 1), reduction="batchmean") * 9
    torch.testing.assert_close(on_teacher(scores, target, 3.0), expected)


def test_distillation_needs_no_labels_and_comes_nearer_to_the_teacher():
    teacher, student = recoup.finetune(net(), data(), QUICK).model, net()
    images = [batch for batch, _ in data()]
    training = recoup.Training(epochs=8, rate=0.05, loss="distillation")
    trained = recoup.finetune(student, images, training, teacher=teacher)
    before, after = (recoup.divergence(model, teacher, images) for model in (student, trained.model))
    assert after < 0.5 * before
    both = recoup.finetune(student, data(), recoup.Training(epochs=1, loss="both"), teacher=teacher)
    parts = [
        recoup.finetune(student, data(), recoup.Training(epochs=1, rate=1e-12, loss=loss), **given).history[0].loss
        for loss, given in (("labels", {}), ("distillation", {"teacher": teacher}), ("both", {"teacher": teacher}))
    ]
    assert both.history[0].loss > 0 and parts[2] == pytest.approx((parts[0] + parts[1]) / 2, rel=1e-4)


def test_the_seed_decides_all():
    runs = [recoup.finetune(net(), data(), QUICK).model for _ in range(2)]
    other = recoup.finetune(net(), data(), dataclasses.replace(QUICK, seed=1)).model
    assert same(bits(runs[0]), bits(runs[1])) and not same(bits(runs[0]), bits(other))
    assert runs[0].a[1].num_batches_tracked == 12 and not any(m.training for m in runs[0].modules())
    assert all(p.grad is None for p in runs[0].parameters())


class StoppedError(Exception):
    pass


def stop_at(step):
    def progress(stage, done, total):
        assert stage == "finetune" and total == 12
        if done == step:
            raise StoppedError

    return progress


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("stopped", [4, 7, 11])
def test_a_run_that_was_stopped_ends_in_the_same_bits(tmp_path, optimiser, stopped):
    training = dataclasses.replace(QUICK, optimiser=optimiser, rate=0.01)
    whole = recoup.finetune(net(), data(), training, validation=data())
    path = tmp_path / "run" / "checkpoint.safetensors"
    with pytest.raises(StoppedError):
        recoup.finetune(net(), data(), training, checkpoint=path, progress=stop_at(stopped))
    assert path.exists() == (stopped > 4)
    rest = recoup.finetune(net(), data(), training, validation=data(), checkpoint=path, resume=True)
    assert same(bits(rest.model), bits(whole.model))
    for a, b in zip(rest.history, whole.history, strict=True):
        assert (a.loss, a.rate) == (b.loss, b.rate)
    assert rest.history[-1].accuracy == whole.history[-1].accuracy
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    again = recoup.finetune(net(), data(), training, checkpoint=path, resume=True)
    assert same(bits(again.model), bits(whole.model)) and again.history == rest.history


def test_a_shuffling_loader_resumes_too(tmp_path):
    images, labels = (torch.cat(parts) for parts in zip(*data(), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 24, shuffle=True)
    whole, path = recoup.finetune(net(), loader, QUICK), tmp_path / "c"
    with pytest.raises(StoppedError):
        recoup.finetune(net(), loader, QUICK, checkpoint=path, progress=stop_at(6))
    assert same(bits(recoup.finetune(net(), loader, QUICK, checkpoint=path, resume=True).model), bits(whole.model))


def checkpointed(tmp_path):
    path = tmp_path / "c.safetensors"
    recoup.finetune(net(), data(), QUICK, checkpoint=path)
    return path


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    path = checkpointed(tmp_path)
    before = path.read_bytes()

    def resumed(model=None, batches=None, training=QUICK):
        return recoup.finetune(model or net(), batches or data(), training, checkpoint=path, resume=True)

    with pytest.raises(ArtefactError, match=r"other settings: rate was 0.05 and is 0.5\. Give those"):
        resumed(training=dataclasses.replace(QUICK, rate=0.5))
    with pytest.raises(ArtefactError, match="of epochs with 4 batches, not 2"):
        resumed(batches=data(48))
    with seeded(5), pytest.raises(ArtefactError, match="began with another model"):
        resumed(Net())
    with pytest.raises(ArtefactError, match=r"exists already. Go on from it with resume=True"):
        recoup.finetune(net(), data(), QUICK, checkpoint=path)
    with pytest.raises(UsageError, match="resume=True goes on from a checkpoint"):
        recoup.finetune(net(), data(), QUICK, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "bit", "facts", "foreign", "text"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    path = checkpointed(tmp_path)
    content = bytearray(path.read_bytes())
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if damage == "cut":
        path.write_bytes(content[:-100])
    elif damage == "bit":
        content[-5] ^= 1
        path.write_bytes(content)
    elif damage == "facts":
        facts = json.loads(metadata["facts"])
        facts["history"] = facts["history"][:1]
        save_file(tensors, path, {**metadata, "facts": json.dumps(facts)})
    elif damage == "foreign":
        save_file(tensors, path)
    else:
        path.write_text("not a checkpoint")
    with pytest.raises(ArtefactError, match=r"is damaged|is no checkpoint of recoup.finetune"):
        recoup.finetune(net(), data(), QUICK, checkpoint=path, resume=True)


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    with safe_open(checkpointed(tmp_path), framework="pt") as file:
        names, facts = list(file.keys()), json.loads(file.metadata()["facts"])
    assert {name.split(".")[0] for name in names} == {"model", "optimiser"}
    assert facts["run"]["settings"] == dataclasses.asdict(QUICK) and len(facts["history"]) == 3


def test_a_loss_that_is_no_number_stops_and_the_last_checkpoint_stays(tmp_path):
    class Spoiling:
        def __init__(self):
            self.reads = 0  # the first is the look of the checkpoint, the third that of epoch 2

        def __len__(self):
            return 4

        def __iter__(self):
            self.reads += 1
            for images, labels in data():
                yield (images * float("nan") if self.reads == 3 else images), labels

    path = tmp_path / "c"
    with pytest.raises(TrainingError, match="loss is NaN or infinite in epoch 2.*Lower the rate"):
        recoup.finetune(net(), Spoiling(), QUICK, checkpoint=path)
    rest = recoup.finetune(net(), data(), QUICK, checkpoint=path, resume=True)
    assert same(bits(rest.model), bits(recoup.finetune(net(), data(), QUICK).model))


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_things_are_as_they_were(fails):
    model, teacher, batches = net(), net(), data()
    model.train()
    before = bits(model), bits(teacher), copy.deepcopy(batches), [m.training for m in model.modules()]
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    training = dataclasses.replace(QUICK, loss="both")
    try:
        if fails:
            with pytest.raises(StoppedError):
                recoup.finetune(model, batches, training, teacher=teacher, progress=stop_at(5))
        else:
            with torch.no_grad():
                recoup.finetune(model, batches, training, teacher=teacher, validation=batches)
        assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic
    finally:
        torch.backends.cudnn.benchmark = False
    assert same(bits(model), before[0]) and same(bits(teacher), before[1])
    assert [m.training for m in model.modules()] == before[3] and all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(a, b) for old, new in zip(before[2], batches, strict=True) for a, b in zip(old, new, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_bfloat16_learns_and_keeps_weights():
    trained = recoup.finetune(net(), data(), dataclasses.replace(QUICK, precision="bfloat16", epochs=6))
    assert {p.dtype for p in trained.model.parameters()} == {torch.float32}
    assert trained.history[-1].loss < trained.history[0].loss


@pytest.mark.parametrize("kind", [Net, Fixed])
def test_results_of_either_form_train_like_their_class(kind):
    """A mask that keeps all makes the same network: the standalone one has to end where the class does."""
    model = net(kind)
    result = recoup.prune(model, [torch.cat([x for x, _ in data()])], widths={"a.0": 5}, method="paper")
    assert isinstance(result.model, Standalone) == (kind is Fixed)
    trained = recoup.finetune(result.model, data(), recoup.Training(epochs=8, rate=0.1), validation=data())
    assert trained.history[-1].accuracy > 90 > trained.history[0].accuracy
    for name in ("a.1.running_mean", "a.1.running_var"):
        assert not torch.equal(trained.model.get_buffer(name), result.model.get_buffer(name))
    again = recoup.finetune(result.model, data(), recoup.Training(epochs=8, rate=0.1))
    assert same(bits(again.model), bits(trained.model))
    with torch.no_grad():  # eval mode again: one image does not depend on the others
        x = data()[0][0]
        torch.testing.assert_close(trained.model(x)[:1], trained.model(x[:1]))


def test_a_standalone_graph_takes_the_steps_of_its_class():
    model = net(Fixed)
    traced = recoup.trace(model, data()[0][0])
    host = traced.form.host
    training = recoup.Training(epochs=2, rate=0.05)
    ours, theirs = (recoup.finetune(each, data(), training).model for each in (host, model))
    expected, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
    trained = [name for name in expected if name in found]
    assert len(trained) >= 6
    for name in trained:
        torch.testing.assert_close(found[name], expected[name])
    for name, value in theirs.named_buffers():
        if "running" in name:
            torch.testing.assert_close(ours.get_buffer(name), value)


def test_images_are_flipped_on_request_and_nothing_else_is():
    images, tokens = torch.arange(40 * 2 * 4 * 6.0).view(40, 2, 4, 6), torch.arange(40.0)[:, None]
    flipped = varied(Inputs((images, tokens), {}), "flip", torch.Generator().manual_seed(0))
    mirrored = (flipped.args[0] == images.flip(3)).flatten(1).all(1)
    whole = (flipped.args[0] == images).flatten(1).all(1)
    assert bool((mirrored ^ whole).all()) and 10 < int(mirrored.sum()) < 30
    assert flipped.args[1] is tokens
    assert varied(Inputs((images,), {}), "none", torch.Generator()).args[0] is images


def test_batches_that_cannot_be_read_again_are_refused():
    with pytest.raises(CalibrationError, match="batches is an iterator.*every epoch reads it again. Pass a list"):
        recoup.finetune(net(), iter(data()), QUICK)
    with pytest.raises(CalibrationError, match="training gave no batch"):
        recoup.finetune(net(), [], QUICK)


def test_batches_without_a_length_are_counted():
    class Unsized:
        def __iter__(self):
            return iter(data())

    assert same(bits(recoup.finetune(net(), Unsized(), QUICK).model), bits(recoup.finetune(net(), data(), QUICK).model))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.full((24,), 4), "go from 4 to 4, but the model has 4 scores"),
        (torch.zeros(23).long(), r"labels of shape \(23,\) for scores of shape \(24, 4\)"),
        (torch.zeros(24), "are of torch.float32. Give class numbers"),
        ("cats", "are no numbers"),
    ],
)
def test_labels_that_make_no_sense_are_refused(labels, said):
    with pytest.raises(CalibrationError, match=said):
        recoup.finetune(net(), [(data()[0][0], labels)], QUICK)


def test_what_cannot_be_trained_is_refused():
    images = [images for images, _ in data()]
    with pytest.raises(CalibrationError, match="training batch 1 has no labels.*loss='distillation'"):
        recoup.finetune(net(), images, QUICK)
    with pytest.raises(UsageError, match="loss='both' learns from a teacher"):
        recoup.finetune(net(), data(), dataclasses.replace(QUICK, loss="both"))
    with pytest.raises(UsageError, match="a teacher is given, and loss='labels'"):
        recoup.finetune(net(), data(), QUICK, teacher=net())
    with pytest.raises(UsageError, match="nothing would be trained"):
        recoup.finetune(net().requires_grad_(False), data(), QUICK)
    with pytest.raises(UsageError, match=r"class scores of shape \(samples, classes, ...\), the model returned"):
        recoup.finetune(nn.Sequential(nn.Flatten(), nn.Linear(108, 1)), data(), QUICK)
    with pytest.raises(UsageError, match=r"teacher returns scores of shape \(24, 3\), the model \(24, 4\)"):
        small = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
        recoup.finetune(net(), data(), dataclasses.replace(QUICK, loss="both"), teacher=small)
    with pytest.raises(CalibrationError, match="training batch 1 with samples of shape"):
        recoup.finetune(net(), [(torch.zeros(24, 5, 6, 6), torch.zeros(24).long())], QUICK)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"epochs": -1}, "epochs must be a whole number of at least 0"),
        ({"optimiser": "adam"}, "unknown optimiser 'adam'.*Did you mean 'adamw'"),
        ({"rate": 0.0}, "rate must be a number above 0"),
        ({"momentum": 1.0}, "momentum must lie from 0 to below 1"),
        ({"warm_up": -0.1}, "warm_up must lie from 0"),
        ({"smoothing": 1.0}, "smoothing must lie from 0 to below 1"),
        ({"decay": -1}, "decay must be a number of at least 0"),
        ({"temperature": float("inf")}, "temperature must be a number above 0"),
        ({"loss": "label"}, "unknown loss 'label'"),
        ({"precision": "float16"}, "unknown precision"),
        ({"augment": "mixup"}, "unknown augment"),
        ({"seed": 2**63}, "seed must be below"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(UsageError, match=said):
        recoup.Training(**fields)


def test_every_field_is_in_the_guide():
    _, text = (DOCS / "recoveries.md").read_text().split("## Retraining\n")
    told = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, flags=re.MULTILINE)
    assert told == [(field.name, repr(field.default)) for field in dataclasses.fields(recoup.Training)]


def test_smoothing_spreads_a_share_of_the_label_over_all_classes():
    scores, labels = torch.randn(7, 4), torch.arange(7) % 4
    target = 0.7 * F.one_hot(labels, 4) + 0.3 / 4
    by_hand = -(target * scores.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(on_labels(scores, labels, 0.3), by_hand)
