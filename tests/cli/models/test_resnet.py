import pytest
import torch

from recoup.cli.models import resnet20, resnet56
from recoup.cli.models.resnet import PaddedBlock
from tests.cli.models.test_vgg import macs


@pytest.mark.parametrize(("build", "blocks"), [(resnet20, 3), (resnet56, 9)])
def test_keys_are_those_of_the_public_checkpoints(build, blocks):
    modules = {key.rpartition(".")[0] for key in build().state_dict()}
    inner = {
        f"layer{stage}.{block}.{part}"
        for stage in (1, 2, 3)
        for block in range(blocks)
        for part in ("conv1", "bn1", "conv2", "bn2")
    }
    assert modules == {"conv1", "bn1", "linear"} | inner


def test_stage_shapes():
    state = resnet20().state_dict()
    assert state["layer1.0.conv1.weight"].shape == (16, 16, 3, 3)
    assert state["layer2.0.conv1.weight"].shape == (32, 16, 3, 3)
    assert state["layer3.2.conv2.weight"].shape == (64, 64, 3, 3)
    assert state["linear.weight"].shape == (10, 64)


@pytest.mark.parametrize(("build", "expected"), [(resnet20, 40_551_040), (resnet56, 125_485_696)])
def test_cost_is_that_of_the_published_networks(build, expected):
    assert macs(build(), (3, 32, 32)) == expected


def test_shortcut_subsamples_and_pads_both_sides():
    block = PaddedBlock(16, 32, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)  # what is left is the skip path alone
    x = torch.rand(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    y = block(x)
    torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2], rtol=0, atol=0)
    assert y[:, :8].abs().max() == 0 and y[:, 24:].abs().max() == 0


def test_identity_shortcut_within_a_stage():
    block = PaddedBlock(16, 16, stride=1).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)
