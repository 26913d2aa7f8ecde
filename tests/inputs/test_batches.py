import pytest
import torch

from recoup.inputs.batches import Inputs, call_checked


def writing(x, *, scales):
    return x.sub_(1).mul_(scales[0].mul_(2))


@pytest.fixture
def inputs():
    return Inputs((torch.ones(2, 3),), {"scales": [torch.ones(3)]})


def test_inputs_elsewhere_are_copies_even_on_the_same_device(inputs):
    for other in (inputs.to(torch.device("cpu")), inputs.copy()):
        other.call(writing)
        assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in inputs.tensors())


def test_a_checked_call_leaves_its_inputs_alone(inputs):
    assert all(torch.equal(call_checked(writing, inputs, 1), torch.zeros(2, 3)) for _ in range(2))
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in inputs.tensors())
