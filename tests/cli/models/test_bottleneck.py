import torch
from torch import nn

from recoup.cli.models import resnet50
from recoup.cli.models.bottleneck import Bottleneck
from tests.cli.models.test_vgg import macs
from tests.torchvision_operators import define_missing_torchvision_operators


def test_keys_and_shapes_are_those_of_torchvision_but_for_the_stem():
    define_missing_torchvision_operators()
    from torchvision.models import resnet50 as published

    ours, theirs = resnet50(1000).state_dict(), published(weights=None).state_dict()
    different = {key for key in ours.keys() | theirs.keys() if key not in theirs or key not in ours}
    different |= {key for key in ours.keys() & theirs.keys() if ours[key].shape != theirs[key].shape}
    assert different == {"conv1.weight"}
    assert ours["conv1.weight"].shape == (64, 3, 3, 3)


def test_cost_is_what_can_be_added_up_by_hand():
    # Stages of 32, 16, 8, 4 pixels; a block has in * w + 9 * w * w + 4 * w * w, its first conv before the stride.
    total = 27 * 64 * 32**2
    channels, side = 64, 32
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        total += channels * width * side**2  # the first 1x1 convolution sees the size before the stride
        side //= stride
        total += side**2 * (9 * width**2 + 4 * width**2 + 4 * channels * width)
        total += (blocks - 1) * side**2 * (4 * width**2 + 9 * width**2 + 4 * width**2)
        channels = 4 * width
    assert macs(resnet50(), (3, 32, 32)) == total + 2048 * 10


def test_a_block_adds_to_its_input():
    block = Bottleneck(16, 4, stride=1).eval()
    nn.init.zeros_(block.conv3.weight)
    x = torch.rand(2, 16, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)
