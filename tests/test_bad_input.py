"""Every way to ask for something impossible: a RecoupError that names the thing and the next step."""

import json

import pytest
import torch
from torch import nn

import recoup
from recoup import Budget, errors
from recoup.artefact.files import FORMAT
from tests.hostile.artefact_folders import rehash
from tests.zoo import ZOO

ENTRY = ZOO["plain"]
HALF = Budget(width=0.5)


@pytest.fixture
def model():
    return ENTRY.build(4)


def labelled(samples=20):
    return [(ENTRY.batch(samples), torch.arange(samples) % 4)]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_wrong_image_shape(model):
    with pytest.raises(
        errors.CaptureError, match=r"Sequential fails on inputs of shape \(1, 5, 8, 8\).*Check the shape"
    ):
        recoup.prune(model, [torch.randn(4, 5, 8, 8).double()], budget=HALF)


def test_a_later_batch_of_another_shape_is_named_by_number(model):
    batches = [ENTRY.batch(4), torch.randn(4, 5, 8, 8).double()]
    with pytest.raises(errors.CalibrationError, match=r"calibration batch 2 is of another form.*shape\[1\] == 3 only"):
        recoup.prune(model, batches, budget=HALF)
    with pytest.raises(errors.CalibrationError, match=r"2 with samples of shape \(5, 8, 8\) makes the model fail"):
        recoup.prune(model, batches, budget=HALF, method="paper")


def test_empty_calibration(model):
    with pytest.raises(errors.CalibrationError, match="calibration gave no batch"):
        recoup.prune(model, [], budget=HALF)


def test_exhausted_calibration_iterator(model):
    batches = iter([ENTRY.batch(4)])
    list(batches)
    with pytest.raises(errors.CalibrationError, match="read to its end before: pass a list, a DataLoader"):
        recoup.prune(model, batches, budget=HALF)


def test_a_fresh_generator_is_fine(model):
    result = recoup.prune(model, (ENTRY.batch(10, seed=i) for i in range(3)), budget=HALF)
    assert result.report.samples == 30


@pytest.mark.parametrize("batches", [torch.randn(4, 3, 8, 8), {"x": 1}, 7])
def test_calibration_that_is_one_batch_or_no_iterable(model, batches):
    with pytest.raises(errors.CalibrationError, match=r"must be an iterable of batches.*\[batch\]"):
        recoup.prune(model, batches, budget=HALF)


@pytest.mark.parametrize("batch", ["images", 3, ()])
def test_a_batch_of_unknown_form(model, batch):
    with pytest.raises(errors.CalibrationError, match="cannot be fed to Sequential. Give a tensor"):
        recoup.prune(model, [batch], budget=HALF)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite(model, value):
    bad = ENTRY.batch(4)
    bad[1, 0, 0, 0] = value
    with pytest.raises(errors.CalibrationError, match="calibration batch 2 holds NaN or infinite inputs"):
        recoup.prune(model, [ENTRY.batch(4), bad], budget=HALF)


def test_activations_that_are_not_finite(model):
    message = r"batch 1 to 2: the input of 0.2.0 is NaN or infinite.*normalisation"
    with pytest.raises(errors.CalibrationError, match=message):
        recoup.prune(model, [ENTRY.batch(4), 1.7e308 * ENTRY.batch(4).clamp(-1, 1)], budget=HALF)
    model[0][0][1].weight.data[1] = float("inf")
    with pytest.raises(errors.CalibrationError, match="calibration batch 1: the input of 0.2.0 is NaN or infinite"):
        recoup.prune(model, [ENTRY.batch(8)], budget=HALF)


def test_a_model_in_which_everything_is_locked():
    with pytest.raises(errors.LockedError, match="nothing in Linear can be pruned.*the model returns it"):
        recoup.prune(nn.Linear(3, 4), [torch.randn(5, 3)], budget=HALF)


def test_labels_missing_for_a_tolerance(model):
    with pytest.raises(errors.CalibrationError, match=r"carry no labels.*`budget=`, which needs no labels"):
        recoup.prune(model, [ENTRY.batch(9)], validation=[ENTRY.batch(9)], tolerance=1.0, method="paper")
    with pytest.raises(errors.UsageError, match="a tolerance needs something to measure"):
        recoup.prune(model, [ENTRY.batch(9)], tolerance=1.0, method="paper")


def test_validation_that_can_be_read_once_or_is_empty(model):
    with pytest.raises(errors.CalibrationError, match=r"validation is an iterator.*Pass a list or a DataLoader"):
        recoup.prune(model, [ENTRY.batch(9)], validation=iter(labelled()), tolerance=1.0)
    with pytest.raises(errors.CalibrationError, match="validation gave no batch"):
        recoup.prune(model, [ENTRY.batch(9)], validation=[], tolerance=1.0)


@pytest.mark.parametrize("tolerance", [0.0, -1.0])
def test_tolerance_not_above_zero(model, tolerance):
    with pytest.raises(errors.UsageError, match=f"tolerance must be above 0 points, got {tolerance}"):
        recoup.prune(model, [ENTRY.batch(9)], validation=labelled(), tolerance=tolerance)


@pytest.mark.parametrize("goal", [{}, {"tolerance": 1.0, "budget": HALF}])
def test_one_goal_is_asked_for(model, goal):
    with pytest.raises(errors.UsageError, match="either a tolerance, in points, or a budget"):
        recoup.prune(model, [ENTRY.batch(9)], validation=labelled(), **goal)


def test_two_measures(model):
    with pytest.raises(errors.UsageError, match="either validation= or evaluate="):
        recoup.prune(model, [ENTRY.batch(9)], validation=labelled(), evaluate=lambda _: 1.0, tolerance=1.0)


def test_outputs_that_are_no_class_scores():
    entry = ZOO["several"]
    validation = [(entry.batch(9), torch.arange(9))]
    with pytest.raises(
        errors.CalibrationError, match=r"accuracy needs outputs of shape \(samples, classes\).*`evaluate="
    ):
        recoup.prune(entry.build(4), [entry.batch(9)], validation=validation, tolerance=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selector": "forwrd"}, "unknown selector 'forwrd'.*Did you mean 'forward'"),
        ({"weighting": "slop"}, "unknown weighting 'slop'.*Did you mean 'slope'"),
        ({"order": "upwards"}, "unknown order 'upwards'; there are bottom-up"),
        ({"constraint": "x"}, "unknown constraint"),
        ({"unit": "x"}, "unknown unit"),
        ({"ridge": -1.0}, "ridge must be a number of at least 0"),
        ({"ridge": float("inf")}, "ridge must be a number"),
        ({"positions": 2.5}, "positions must be a whole number"),
        ({"selector": None}, "unknown selector None"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"positions": 0}, "positions must be a whole number of at least 1"),
    ],
)
def test_fields_that_make_no_sense(settings, message):
    with pytest.raises(errors.UsageError, match=message):
        recoup.Paper(**settings)


def test_unknown_method(model):
    with pytest.raises(
        errors.UsageError, match="unknown method 'papr'; there are best, fast, paper, released. Did you mean 'paper'"
    ):
        recoup.prune(model, [ENTRY.batch(9)], budget=HALF, method="papr")


def test_a_model_that_cannot_be_captured():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else x

    with pytest.raises(
        errors.CaptureError, match=r"torch.export: test_bad_input.py:\d+ .* asks for the values of a tensor"
    ):
        recoup.inspect(Branching(), torch.randn(2, 3))


def test_a_model_that_cannot_be_copied():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    with pytest.raises(errors.CaptureError, match="Stubborn cannot be copied.*no copies"):
        recoup.inspect(Stubborn(3, 3), torch.randn(2, 3))


def test_a_model_without_parameters():
    with pytest.raises(errors.CaptureError, match="ReLU has no parameters"):
        recoup.inspect(nn.ReLU(), torch.randn(2, 3))


def test_keep_masks_that_do_not_fit(model):
    data = recoup.split(model, [ENTRY.batch(20)], held_out=False)
    seen = recoup.calibrate(recoup.trace(model, ENTRY.batch(2)), data, recoup.Paper())
    with pytest.raises(errors.UsageError, match="there is no group 'nope'; the groups are 0.0.0"):
        recoup.recover(seen, {"nope": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(errors.UsageError, match="would be left empty"):
        recoup.recover(seen, {"0.0.0": torch.zeros(4, dtype=torch.bool)})
    with pytest.raises(errors.UsageError, match="2: 1 channels to be pruned are locked: the model returns it"):
        recoup.recover(seen, {"2": torch.tensor([True, True, True, False])})


@pytest.fixture
def saved(model, tmp_path):
    result = recoup.prune(model, [ENTRY.batch(20)], budget=HALF)
    return result, result.save(tmp_path / "out")


def test_an_existing_folder_is_left_as_it_is(saved, tmp_path):
    result, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(errors.ArtefactError, match="exists already.*nothing was overwritten"):
        result.save(folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert names_in(tmp_path) == ["out"]


def test_a_folder_that_cannot_be_written(saved, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.ArtefactError, match="cannot write"):
        saved[0].save(tmp_path / "file" / "out")
    assert names_in(tmp_path) == ["file", "out"]


def test_a_failure_in_the_middle_leaves_nothing_behind(saved, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recoup.artefact.writing.render_page", fail)
    with pytest.raises(errors.ArtefactError, match="No space left on device"):
        saved[0].save(tmp_path / "second")
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["plan.json", "model.safetensors"])
def test_missing_and_corrupt_files_are_named(saved, model, name):
    _, folder = saved
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.ArtefactError, match=f"{name} is damaged"):
        recoup.load(folder, model)
    (folder / name).unlink()
    with pytest.raises(errors.ArtefactError, match=f"{name} is missing"):
        recoup.load(folder, model)


@pytest.mark.parametrize("content", ["[]", "{}", json.dumps({"format": FORMAT, "keep": 3})])
def test_json_that_is_no_plan(saved, model, content):
    _, folder = saved
    (folder / "plan.json").write_text(content)
    rehash(folder)
    with pytest.raises(errors.ArtefactError, match="is not a plan"):
        recoup.load(folder, model)


def test_a_plan_of_another_format(saved, model):
    _, folder = saved
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "format": 99}))
    rehash(folder)
    with pytest.raises(errors.ArtefactError, match=f"has format 99, this version reads {FORMAT}"):
        recoup.load(folder, model)


def test_a_plan_for_another_model(saved):
    _, folder = saved
    with pytest.raises(errors.ArtefactError, match=r"0.0.0.weight has shape \(4, 3, 3, 3\); here it is \(5, 3, 3, 3\)"):
        recoup.load(folder, ENTRY.build(5))
    with pytest.raises(errors.ArtefactError, match="was made from the class torch.nn.modules.container:Sequential"):
        recoup.load(folder, nn.Linear(3, 3))
    with pytest.raises(errors.ArtefactError, match="Build (it|the model) exactly as it was before pruning"):
        recoup.load(folder, nn.Linear(3, 3), check=False)


def test_weights_of_another_result(saved, model, tmp_path):
    _, folder = saved
    other = recoup.prune(model, [ENTRY.batch(20)], budget=Budget(width=0.8)).save(tmp_path / "other")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(errors.ArtefactError, match="model.safetensors is damaged"):
        recoup.load(folder, model)
    with pytest.raises(errors.ArtefactError, match="does not fit the model: 0.0.0.weight"):
        recoup.load(folder, model, check=False)


def test_every_error_is_of_one_family():
    family = [
        v
        for v in vars(errors).values()
        if isinstance(v, type) and issubclass(v, BaseException) and not issubclass(v, Warning)
    ]
    assert len(family) > 5
    assert all(issubclass(error, errors.RecoupError) for error in family)
    assert {error.exit_code for error in family} == {1, 2}
    assert all(error.__doc__ for error in family)
