import sys

import pytest
import torch
from torch import nn

from recoup.cli.input_spec import CIFAR, IMAGENET, InputSpec, unnormalised
from recoup.cli.models import open_model, resnet20
from recoup.errors import ModelError, UsageError
from tests.torchvision_operators import define_missing_torchvision_operators


@pytest.fixture
def torchvision_operators():
    define_missing_torchvision_operators()
    define_missing_torchvision_operators()  # again: harmless


@pytest.mark.parametrize("name", ["vgg16_bn", "vgg19_bn", "resnet20", "resnet56", "digits"])
def test_own_models_run_on_the_input_they_declare(name):
    opened = open_model(f"recoup:{name}", classes=3)
    assert opened.spec == f"recoup:{name}"
    assert not any(module.training for module in opened.model.modules())
    with torch.no_grad():
        assert opened.model(torch.zeros(2, *opened.input.shape)).shape == (2, 3)


def test_own_models_declare_the_input_they_were_trained_on():
    assert open_model("recoup:vgg16_bn").input == CIFAR
    assert open_model("recoup:resnet20").input == InputSpec((3, 32, 32), IMAGENET.mean, IMAGENET.std)
    assert open_model("recoup:digits").input == unnormalised((1, 8, 8))


def test_weights_are_loaded_and_input_replaced(tmp_path):
    trained = resnet20()
    torch.save({"state_dict": {f"module.{k}": v for k, v in trained.state_dict().items()}}, tmp_path / "resnet.th")
    opened = open_model("recoup:resnet20", tmp_path / "resnet.th", input=CIFAR)
    assert opened.input == CIFAR
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(opened.model(x), trained.eval()(x), rtol=0, atol=0)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    torch.save(resnet20(classes=7).state_dict(), tmp_path / "resnet.pt")
    with pytest.raises(ModelError, match=r"linear\.weight \(7, 64\) instead of \(10, 64\)"):
        open_model("recoup:resnet20", tmp_path / "resnet.pt")


def test_unknown_names_list_close_ones():
    with pytest.raises(UsageError, match=r"no model 'recoup:vgg16'. Did you mean one of vgg16_bn"):
        open_model("recoup:vgg16")
    with pytest.raises(UsageError, match="Did you mean one of recoup:resnet20"):
        open_model("resnet20")
    with pytest.raises(UsageError, match="cannot have 0 classes"):
        open_model("recoup:resnet20", classes=0)


def test_torchvision(torchvision_operators):
    pytest.importorskip("torchvision")
    opened = open_model("torchvision:squeezenet1_1", classes=5)
    assert opened.input == IMAGENET
    assert opened.model(torch.zeros(1, 3, 224, 224)).shape == (1, 5)
    with pytest.raises(UsageError, match="Did you mean one of resnet18"):
        open_model("torchvision:resnet188")


def test_torchvision_crop_of_the_published_weights(torchvision_operators):
    pytest.importorskip("torchvision")
    assert open_model("torchvision:efficientnet_b1").input.shape == (3, 240, 240)
    assert open_model("torchvision:vit_b_16").input.shape == (3, 224, 224)


def test_torchvision_fetches_no_backbone(torchvision_operators, monkeypatch):
    pytest.importorskip("torchvision")

    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    assert isinstance(open_model("torchvision:lraspp_mobilenet_v3_large").model, nn.Module)


def test_torchvision_that_cannot_be_built_so(torchvision_operators):
    pytest.importorskip("torchvision")
    with pytest.raises(ModelError, match=r"'torchvision:raft_small' could not be built: TypeError"):
        open_model("torchvision:raft_small", classes=3)


def test_timm(torchvision_operators):
    pytest.importorskip("timm")
    opened = open_model("timm:test_vit", classes=4)
    assert opened.input == InputSpec((3, 160, 160), (0.5,) * 3, (0.5,) * 3)
    assert opened.model(torch.zeros(1, 3, 160, 160)).shape == (1, 4)
    with pytest.raises(UsageError, match=r"'timm:resnet188'. Did you mean one of resnet18"):
        open_model("timm:resnet188")


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_missing_library_says_what_to_install(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModelError, match=f"needs '{library}', which is not installed. Run: pip install '{library}'"):
        open_model(f"{library}:resnet18")


FACTORIES = """
from torch import nn

def good():
    return nn.Linear(2, 3)

def wrong():
    return "a network"

def broken():
    raise ValueError("no such\\nfile")

constant = 3
"""


@pytest.fixture
def factories(tmp_path):
    path = tmp_path / "own_model.py"
    path.write_text(FACTORIES)
    return path


def test_factory_in_a_file(factories):
    opened = open_model(f"{factories}:good")
    assert isinstance(opened.model, nn.Linear) and not opened.model.training
    assert opened.input == IMAGENET
    assert open_model(f"{factories}:good", input=CIFAR).input == CIFAR


def test_factory_failures(factories):
    with pytest.raises(ModelError, match=r"own_model.py:broken' raised ValueError: no such when it was called"):
        open_model(f"{factories}:broken")
    with pytest.raises(ModelError, match=r"returned a str. A model factory has to return an nn.Module"):
        open_model(f"{factories}:wrong")
    with pytest.raises(UsageError, match=r"is a int, not a callable"):
        open_model(f"{factories}:constant")
    with pytest.raises(UsageError, match=r"5 classes cannot be asked of it"):
        open_model(f"{factories}:good", classes=5)


def test_factory_in_an_installed_module():
    assert isinstance(open_model("recoup.cli.models.resnet:resnet20").model, nn.Module)
