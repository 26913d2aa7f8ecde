import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from recoup.cli.models import load_weights
from recoup.errors import ModelError


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def assert_same(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for key, value in state.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0, check_dtype=False)


def refusal(model: nn.Module, path: Path) -> str:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        load_weights(model, path)
    assert_same(model, before)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_checkpoints_plain_nested_and_prefixed(tmp_path, wrap, prefix):
    trained, model = small(), small()
    torch.save(wrap({prefix + key: value for key, value in trained.state_dict().items()}), tmp_path / "weights.pt")
    load_weights(model, tmp_path / "weights.pt")
    assert_same(model, trained.state_dict())


def test_half_precision_safetensors_are_cast(tmp_path):
    trained, model = small().half(), small()
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    load_weights(model, str(tmp_path / "weights.safetensors"))
    assert_same(model, trained.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_prefix_stays_where_the_model_has_it_too(tmp_path):
    trained, model = nn.Sequential(), nn.Sequential()
    for wrapper in (trained, model):
        wrapper.add_module("module", nn.Linear(2, 2))
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    load_weights(model, tmp_path / "weights.pt")
    assert_same(model, trained.state_dict())


def test_old_checkpoints_have_no_batch_counters(tmp_path):
    trained, model = small(), small()
    state = {key: value for key, value in trained.state_dict().items() if "num_batches" not in key}
    torch.save(state, tmp_path / "weights.pt")
    load_weights(model, tmp_path / "weights.pt")
    assert_same(model, state)


def test_misfits_are_named(tmp_path):
    state = small().state_dict()
    state["head.weight"] = state.pop("0.weight")
    state["3.weight"] = torch.zeros(5, 4)
    torch.save(state, tmp_path / "weights.pt")
    message = refusal(small(), tmp_path / "weights.pt")
    assert "1 missing (0.weight)" in message
    assert "1 unexpected (head.weight)" in message
    assert "1 of another shape (3.weight (5, 4) instead of (2, 4))" in message
    assert "number of classes" in message


def test_long_lists_of_misfits_are_cut(tmp_path):
    torch.save({f"layer{i}": torch.zeros(1) for i in range(9)}, tmp_path / "weights.pt")
    assert "9 unexpected (layer0, layer1, layer2 and 6 more)" in refusal(small(), tmp_path / "weights.pt")


def test_missing_file(tmp_path):
    assert "There is no weights file" in refusal(small(), tmp_path / "nowhere.pt")


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", None])
def test_damaged_files(tmp_path, name, content):
    path = tmp_path / name
    if content is None:
        (safetensors.torch.save_file if name.endswith("safetensors") else torch.save)(small().state_dict(), path)
        content = path.read_bytes()[:-200]
    path.write_bytes(content)
    assert "the file is damaged" in refusal(small(), path)


class Attack:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self):
        return (Path.touch, (self.victim,))


@pytest.mark.parametrize(
    "save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))]
)
def test_pickled_code_is_refused(tmp_path, save):
    victim = tmp_path / "victim"
    save({"state_dict": Attack(victim)}, tmp_path / "weights.pt")
    assert "could run code" in refusal(small(), tmp_path / "weights.pt")
    assert not victim.exists()


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3}, {"state_dict": {"0.weight": 3}}, torch.zeros(2)])
def test_something_other_than_a_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    assert "does not hold a state dict" in refusal(small(), tmp_path / "weights.pt")
