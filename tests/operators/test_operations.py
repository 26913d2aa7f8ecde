"""Operations that few networks have, each between two layers: pruned by half and exact, or locked by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import LockedError


class Between(nn.Module):
    """Layers `a` and `b`, convolutions or linear, and what a test does between them."""

    def __init__(self, body, outputs=16, inputs=16, linear=False, **extra):
        super().__init__()
        self.body = body
        self.a = nn.Linear(6, outputs) if linear else nn.Conv2d(3, outputs, 3, padding=1)
        self.b = nn.Linear(inputs, 4) if linear else nn.Conv2d(inputs, 4, 1)
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.b(self.body(self, self.a(x)))


def pruned(model, linear=False):
    torch.manual_seed(0)
    x = torch.randn(40, 9, 6) if linear else torch.randn(40, 3, 8, 8)
    result = recoup.prune(model.double().eval(), [x.double()], budget=recoup.Budget(width=0.5))
    assert result.report.proof.difference < 1e-10
    return result.report.groups[0]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (lambda m, h: F.fold(F.unfold(h, 3, padding=1), (8, 8), 3, padding=1), 16),
        (lambda m, h: F.unfold(h, 3, padding=1).unflatten(2, (8, 8)), 16 * 9),
        (lambda m, h: F.grid_sample(h, m.grid.expand(len(h), -1, -1, -1), align_corners=False), 16),
        (lambda m, h: F.interpolate(F.max_pool2d(h, 2), scale_factor=2, mode="bilinear"), 16),
        (
            lambda m, h: h.max(dim=2, keepdim=True).values + h.amin((2, 3), keepdim=True) + h.std((2, 3), keepdim=True),
            16,
        ),
        (lambda m, h: h / h.norm(dim=(2, 3), keepdim=True), 16),
        (lambda m, h: F.instance_norm(h).softmax(2).cumsum(3), 16),
        (lambda m, h: F.pixel_unshuffle(h, 2), 64),
        (lambda m, h: torch.stack([h, 2 * h], 1).unbind(1)[1] * m.scale, 16),
        (lambda m, h: torch.cat([h, torch.zeros_like(h)], 1).narrow(1, 2, 12), 12),
        (lambda m, h: F.pad(h, (1, 1, 1, 1), mode="reflect")[:, 3:9], 6),
        (lambda m, h: h.view(len(h), 2, 8, 8, 8).softmax(1).sum(1), 8),
    ],
)
def test_maps(body, inputs):
    group = pruned(
        Between(
            body, inputs=inputs, grid=torch.rand(1, 8, 8, 2).double() - 0.5, scale=nn.Parameter(torch.rand(1, 16, 1, 1))
        )
    )
    assert group.locked == 0
    assert group.after <= group.before * 0.75


def heads(h, count):
    return h.unflatten(2, (count, -1)).transpose(1, 2)


def attend(m, h, change=lambda m, q: q):
    q, k, v = h.view(len(h), 9, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
    scores = change(m, q) @ k.transpose(-1, -2) * m.temperature + m.table[:, m.places.view(-1)].view(4, 9, 9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def rotate(m, q):
    turned = torch.cat([-q[..., 2:], q[..., :2]], -1)
    return q * m.cosine + turned * m.sine


@pytest.mark.parametrize("change", [lambda m, q: q, rotate, lambda m, q: F.layer_norm(q, [4], m.weight)])
def test_attention_with_positions_temperatures_and_norms_goes_by_heads(change):
    places = torch.arange(9)[:, None] - torch.arange(9)[None] + 8
    model = Between(
        lambda m, h: attend(m, h, change),
        outputs=48,
        linear=True,
        temperature=nn.Parameter(torch.rand(4, 1, 1)),
        table=nn.Parameter(torch.randn(4, 17)),
        places=places,
        weight=nn.Parameter(torch.rand(4)),
        cosine=torch.rand(9, 4).double(),
        sine=torch.rand(9, 4).double(),
    )
    group = pruned(model, linear=True)
    assert (group.before, group.after, group.locked) == (4, 2, 0)


@pytest.mark.parametrize(
    ("body", "before"),
    [
        (lambda m, h: torch.einsum("bnd,bmd->bnm", h, h).softmax(-1) @ h, None),
        (lambda m, h: h @ m.square, 16),
        (lambda m, h: torch.addmm(m.shift, h.flatten(0, 1), m.square).view(h.shape), 16),
        (
            lambda m, h: (
                torch.einsum("bnhd,bmhd->bhnm", *[h.view(len(h), 9, 4, 4)] * 2)
                .softmax(-1)
                .mean(3)
                .transpose(1, 2)
                .repeat_interleave(4, 2)
            ),
            4,
        ),
        (lambda m, h: F.scaled_dot_product_attention(m.q(h), m.q(h), h), 16),
    ],
)
def test_products(body, before):
    model = Between(
        body,
        linear=True,
        square=nn.Parameter(torch.randn(16, 16)),
        shift=nn.Parameter(torch.randn(16)),
        q=nn.Linear(16, 5),
    )
    if before is None:
        with pytest.raises(LockedError, match="einsum in forward mixes channels"):
            pruned(model, linear=True)
        return
    group = pruned(model, linear=True)
    assert (group.before, group.after, group.locked) == (before, before // 2, 0)


def test_embeddings_and_bilinear_layers_make_channels():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.two, self.head = nn.Embedding(11, 8), nn.Bilinear(3, 3, 6), nn.Linear(6, 4)
            self.down, self.norm = nn.Linear(8, 3), nn.LayerNorm(3)

        def forward(self, numbers):
            h = self.norm(self.down(torch.tanh(self.table(numbers))))
            return self.head(torch.tanh(self.two(h, h.flip(1))))

    model = Tokens().eval()
    result = recoup.prune(model, [torch.randint(11, (50, 7))], budget=recoup.Budget(width=0.5))
    assert {row.name: row.after for row in result.report.groups} == {"table": 4, "down": 3, "two": 3, "head": 4}
    assert result.model.table.embedding_dim == 4
