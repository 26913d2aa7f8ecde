"""Writes into a graph's own values: nobody sees the difference, and the channels they lie in are free."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import LockedError
from recoup.graph.capture import capture
from recoup.graph.memory import memory_of
from recoup.inputs.batches import inputs_of
from recoup.operators.names import writes
from recoup.surgery.verify import agree


class Between(nn.Module):
    """Two convolutions, what a test does with their outputs, and one more convolution."""

    def __init__(self, body, inputs):
        super().__init__()
        self.body = body
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
        self.head = nn.Conv2d(inputs, 4, 1)

    def forward(self, x):
        return self.head(self.body(self.a(x), self.b(x)))


def relu_on_a_cat(a, b):
    return F.relu(torch.cat([a, b], 1), inplace=True)


def dropout_then_relu(a, b):
    return F.relu(F.dropout(torch.cat([a, b], 1), 0.5, training=False, inplace=True), inplace=True)


def relu_on_a_slice(a, b):
    F.relu(a[:, :8], inplace=True)
    return a + b


def chunk_and_base(a, b):
    first, second = a.chunk(2, 1)
    first.relu_()
    a.mul_(2)
    second.add_(1)
    return torch.cat([first, second, a, b], 1)


def chunks_that_never_meet(a, b):
    first, second = torch.cat([a, b], 1).split([10, 22], 1)
    first.relu_()
    return torch.cat([second, first], 1)


def filled_with_two(a, b):
    both = torch.zeros_like(a).repeat(1, 2, 1, 1)
    both[:, :16] = a
    both[:, 16:] = b
    return both


def put_beside_positions(a, b):
    wide = torch.zeros(len(a), 16, 9, 9, dtype=a.dtype)
    wide[:, :, 1:, :-1] = a
    return wide[:, :, 1:, 1:] + b


def positions_from_others(a, b):
    a[:, :, 1:] += a[:, :, :-1].clone()
    a[:, :, 0] = 0
    return a + b


def permuted(a, b):
    rows = a.permute(0, 2, 3, 1).view(len(a), 64, 16).transpose(1, 2)
    rows[:, :, 1:5].sigmoid_()
    return a + b


def flattened(a, b):
    flat = a.flatten(2)
    flat.relu_()
    return (a + flat.view_as(a)) * b


def unbound(a, b):
    first, second = a.view(len(a), 2, 8, 8, 8).unbind(1)
    first.relu_()
    second.neg_()
    return a + b


def copied_by_reshape(a, b):
    turned = a.transpose(2, 3).reshape(len(a), 16, 64)
    turned.relu_()
    return a + turned.view_as(a) + b


def one_of_several_results(a, b):
    largest, _ = a.max(2, keepdim=True)
    largest *= 0.5
    return a + largest + largest.relu() + b


BODIES = {
    relu_on_a_cat: 32,
    dropout_then_relu: 32,
    relu_on_a_slice: 16,
    chunk_and_base: 48,
    chunks_that_never_meet: 32,
    filled_with_two: 32,
    put_beside_positions: 16,
    positions_from_others: 16,
    permuted: 16,
    flattened: 16,
    unbound: 16,
    copied_by_reshape: 16,
    one_of_several_results: 16,
}


def built(body):
    torch.manual_seed(0)
    return Between(body, BODIES[body]).double().eval()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_graph_writes_nothing_and_computes_the_same_for_any_batch(body):
    model, x = built(body), torch.randn(3, 3, 8, 8).double()
    traced = recoup.trace(model, x)
    assert not any(writes(node) for node in traced.standalone.original.graph.nodes)
    assert agree(model, traced.standalone.host, x).difference < 1e-12


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_its_channels_are_free_and_half_of_them_go(body):
    model, x = built(body), torch.randn(24, 3, 8, 8).double()
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast")
    assert result.report.proof.difference < 1e-10
    rows = [row for row in result.report.groups if row.name != "head"]
    assert [row.locked for row in rows] == [0] * len(rows)
    assert sum(row.after for row in rows) == sum(row.before for row in rows) // 2


def test_a_write_into_an_input_or_a_buffer_stays():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.b(self.a(x.mul_(2)).relu_())

    model = Counting().eval()
    captured = capture(model, inputs_of(torch.randn(1, 4), model))
    left = [node for node in captured.graph.nodes if writes(node)]
    assert {memory_of(node.args[0]).name for node in left} == {"x", "b_calls"}
    assert "aten.relu.default" in {str(node.target) for node in captured.graph.nodes}


def test_what_cannot_be_put_back_is_left_and_locked():
    def diagonal(a, b):
        a.diagonal(0, 2, 3).relu_()
        return a + b

    model = Between(diagonal, 16).double().eval()
    with pytest.raises(LockedError, match="relu in forward writes into a part of it"):
        recoup.prune(model, [torch.randn(8, 3, 8, 8).double()], budget=recoup.Budget(width=0.5))


def test_a_layer_that_nobody_reads_is_no_obstacle():
    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.spare, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(3, 16, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            self.spare(x)
            h = self.a(x)
            return self.head(h[:, :8] + h[:, 8:])

    result = recoup.prune(Unread().eval(), [torch.randn(16, 3, 4, 4)], budget=recoup.Budget(width=0.5), method="fast")
    assert {row.name: row.after for row in result.report.groups}["a"] == 4
