import pytest
import torch

from recoup.cli.input_spec import CIFAR, IMAGENET, InputSpec, unnormalised
from recoup.errors import UsageError


@pytest.mark.parametrize("spec", [CIFAR, IMAGENET])
def test_the_mean_goes_to_zero_and_a_deviation_to_one(spec):
    mean = torch.tensor(spec.mean).view(1, 3, 1, 1).expand(2, 3, 4, 4)
    std = torch.tensor(spec.std).view(1, 3, 1, 1)
    torch.testing.assert_close(spec.normalise(mean), torch.zeros(2, 3, 4, 4))
    torch.testing.assert_close(spec.normalise(mean + std), torch.ones(2, 3, 4, 4))


def test_unnormalised_is_the_identity():
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(unnormalised((1, 8, 8)).normalise(x), x)


def test_input_is_left_as_it_was():
    x = torch.ones(1, 3, 2, 2)
    CIFAR.normalise(x)
    assert torch.equal(x, torch.ones(1, 3, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), ()), r"Input shape \(\) is not usable"),
        (((3, 0, 4), (0,) * 3, (1,) * 3), r"Input shape \(3, 0, 4\) is not usable"),
        (((3, 4, 4), (0,), (1,) * 3), "has 3 channels, but there are 1 means and 3 deviations"),
        (((1, 4, 4), (0,), (0,)), "must all be above zero"),
    ],
)
def test_senseless_inputs(arguments, message):
    with pytest.raises(UsageError, match=message):
        InputSpec(*arguments)
