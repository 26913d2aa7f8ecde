import pytest
import torch
from torch import nn

from recoup.cli.models import vgg16_bn, vgg16_fc_bn, vgg19_bn

NORM_KEYS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def keys_of(convolutions: list[int], linear: int) -> set[str]:
    norms = {f"{index + 1}.{key}" for index in convolutions for key in NORM_KEYS}
    return {f"{index}.weight" for index in convolutions} | norms | {f"{linear}.weight", f"{linear}.bias"}


@pytest.mark.parametrize(
    ("build", "convolutions", "linear"),
    [
        (vgg16_bn, [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40], 45),
        (vgg19_bn, [0, 3, 7, 10, 14, 17, 20, 23, 27, 30, 33, 36, 40, 43, 46, 49], 54),
    ],
)
def test_keys_are_the_indices_of_published_checkpoints(build, convolutions, linear):
    assert set(build().state_dict()) == keys_of(convolutions, linear)


def macs(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiplications of all convolutions and linear layers, counted from what they really compute."""
    total = 0

    def count(module, args, output):
        nonlocal total
        total += output[0].numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return total


def test_cost_is_that_of_the_published_networks():
    # By hand: sum of 9 * in * out * side^2 over the layers, plus the 512 x 10 classifier.
    assert macs(vgg16_bn(), (3, 32, 32)) == 313_201_664
    assert macs(vgg19_bn(), (3, 32, 32)) == 398_136_320


def test_convolutions_have_no_bias_and_keep_the_size():
    convolutions = [module for module in vgg16_bn() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 13
    assert all(conv.bias is None and conv.padding == (1, 1) for conv in convolutions)


def test_classes_set_the_last_layer():
    assert vgg16_bn(classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_three_fully_connected_layers_have_batch_norm_between_them():
    head = list(vgg16_fc_bn())[-7:]
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [type(part) for part in head] == kinds
    # That of VGG-16 and two products of 512 x 512.
    assert macs(vgg16_fc_bn(), (3, 32, 32)) == 313_201_664 + 2 * 512**2
    assert vgg16_fc_bn(classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
