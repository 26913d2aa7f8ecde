"""Numbers that the code makes of constants: to index by them is a movement, whatever else they could have been."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.graph.capture import capture
from recoup.graph.index_numbers import index_numbers
from recoup.inputs.batches import inputs_of
from recoup.inputs.samples import sampled_call

LENGTH, HEADS = 6, 4


class Placed(nn.Module):
    """Attention whose heads read a table of relative positions, by numbers that the code works out at every call."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.qkv, self.out = nn.Linear(5, 48), nn.Linear(16, 3)
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, HEADS))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        bias = self.table[self.body(x)].unflatten(0, (x.shape[1], -1)).permute(2, 0, 1)
        real = (torch.arange(x.shape[1]) >= 0)[None, None, :, None].expand(1, 1, -1, x.shape[1])
        return self.out(F.scaled_dot_product_attention(q, k, v, bias + real).transpose(1, 2).flatten(2))


def differences(x):
    place = torch.arange(x.shape[1])
    return (place[:, None] - place[None] + LENGTH - 1).flatten()


def by_a_grid_written_into(x):
    rows, columns = torch.meshgrid(torch.arange(x.shape[1]), torch.arange(x.shape[1]), indexing="ij")
    grid = torch.stack([rows, columns])
    grid[1] *= -1
    grid[1, :, 0] = 0
    return (grid.sum(0) + LENGTH - 1).flatten()


def in_buckets(x):
    apart = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None]
    return (torch.log1p(apart.abs().float()) * 2).long().flatten()


@pytest.mark.parametrize("body", [differences, by_a_grid_written_into, in_buckets], ids=lambda body: body.__name__)
@pytest.mark.parametrize("keep_class", [None, False])
def test_heads_that_read_a_table_by_computed_numbers_go(body, keep_class):
    model, x = Placed(body).double().eval(), torch.randn(80, LENGTH, 5).double()
    assert recoup.trace(model, x).structure.group("qkv").free == HEADS
    result = recoup.prune(model, [x], widths={"qkv": 2}, method="fast", keep_class=keep_class)
    assert result.report.proof.difference < 1e-10
    assert dict(result.model.named_parameters())["table"].shape == (2 * LENGTH - 1, 2)
    assert result.model(x[:2, :4]).shape == (2, 4, 3)


def numbers_of(body):
    model = Placed(body).eval()
    captured = capture(model, sampled_call(inputs_of(torch.randn(2, LENGTH, 5), model)).one)
    return captured, index_numbers(captured)


def test_they_are_what_the_code_computes():
    captured, found = numbers_of(differences)
    (picked,) = (node for node in captured.graph.nodes if "index.Tensor" in str(node.target))
    (last,) = (place for place in picked.args[1] if place is not None)
    assert torch.equal(found[last.name], differences(torch.empty(1, LENGTH)))


def test_numbers_of_another_use_or_of_the_input_are_none():
    captured, found = numbers_of(lambda x: differences(x) + 0 * (x.sum() > 0).long())
    assert not found
    captured, found = numbers_of(differences)
    compared = {node.name for node in captured.graph.nodes if "aten.ge." in str(node.target)}
    assert compared and not compared & found.keys()


def test_random_numbers_are_not_taken_for_constants():
    _, found = numbers_of(lambda x: torch.randint(2 * LENGTH - 1, (x.shape[1] ** 2,)))
    assert not found
