"""Reading and writing by number along positions: channels stay free, and half of them go exactly."""

import pytest
import torch
from torch import nn

import recoup
from recoup.tracing.trace import trace


class Graph(nn.Module):
    """Two linear layers on nodes, and what a test does with the first one's outputs and the nodes' neighbours."""

    def __init__(self, body, inputs=8):
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b = nn.Linear(5, 8), nn.Linear(inputs, 3)
        self.register_buffer("source", torch.randint(6, (11,)))
        self.register_buffer("target", torch.randint(6, (11,)))

    def forward(self, x):
        return self.b(self.body(self, self.a(x).relu(), x))


def sums(m, h, x):
    return torch.zeros_like(h).index_add(1, m.target, h.index_select(1, m.source))


def sums_in_place(m, h, x):
    return h.new_zeros(h.shape).index_add_(1, m.target, h[:, m.source], alpha=2)


def scattered(m, h, x):
    places = m.target[None, :, None].expand(len(h), -1, h.shape[-1])
    return torch.zeros_like(h).scatter_add_(1, places, h[:, m.source])


def largest(m, h, x):
    places = m.target[None, :, None].expand_as(h[:, m.source])
    return h.scatter_reduce(1, places, h[:, m.source], "amax")


def copied(m, h, x):
    return h.index_copy(1, m.target[:2], h[:, m.source[:2]]).index_fill(1, m.target[3:4], 0.5)


def sorted_by_the_input(m, h, x):
    order = x.sum(2, keepdim=True).argsort(1)
    return h.gather(1, order.expand(-1, -1, h.shape[-1]))


def along_another(m, h, x):
    return torch.take_along_dim(h, x.sum(2, keepdim=True).argsort(1), 1)


def masked(m, h, x):
    h[x.sum(2) > 0] = 0.5
    h[h > 0.7] = 1
    return h


def by_stored_numbers(m, h, x):
    return h.gather(2, m.source[:4].repeat(len(h), 6, 1)) + h[..., :4]


BODIES = {sums: 8, sums_in_place: 8, scattered: 8, largest: 8, copied: 8, sorted_by_the_input: 8, along_another: 8,
          masked: 8, by_stored_numbers: 4}  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_channels_are_free_and_go_exactly(body):
    model = Graph(body, BODIES[body]).double().eval()
    x = torch.randn(40, 6, 5).double()
    group = trace(model, x).structure.group("a")
    assert group.reasons == () and group.free > 1
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast")
    assert result.report.proof.difference < 1e-10
    assert result.report.groups[0].after <= (group.width + 1) // 2


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda m, h, x: h.gather(2, (x[..., :4] > 0).long()).repeat(1, 1, 2), "gather"),
        (lambda m, h, x: torch.zeros_like(h).scatter_add(2, (x[..., :4] > 0).long(), h[..., 4:]), "scatter_add"),
        (lambda m, h, x: h.index_add(2, m.target[:8], h), "index_add"),
    ],
)
def test_numbers_that_pick_channels_lock_them(body, name):
    group = trace(Graph(body).eval(), torch.randn(2, 6, 5)).structure.group("a")
    assert group.free == 0
    assert group.reasons[0].startswith(f"{name} in forward picks channels by number")
