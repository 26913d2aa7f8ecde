from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recoup.inputs.batches import Inputs, call_checked, leaves_in, tensors_in


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


def test_what_leads_back_to_itself_is_read_once():
    result = SimpleNamespace(scores=torch.ones(2), steps=[1, None])
    result.parts = {"of": result, "steps": result.steps}
    assert [str(leaf) for leaf in leaves_in(result)] == ["tensor([1., 1.])", "1", "None", "1", "None"]


def test_a_number_that_stands_for_a_size_is_one_leaf():
    class Flat(nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0], x.shape[1] * x.shape[2])

    sizes = {"x": {2: torch.export.Dim("width", max=64)}}
    graph = torch.export.export(Flat(), (torch.ones(2, 3, 4),), dynamic_shapes=sizes).graph
    numbers = [value for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.SymInt)]
    assert numbers and all(leaves_in(number) == [number] and not tensors_in(number) for number in numbers)
