"""What can be written in several ways: one layer in the graph, free channels, and refits that reach it."""

import pytest
import torch
from torch import nn

import recoup
from recoup.tracing.trace import trace


class Written(nn.Module):
    """Two linear layers and in the middle a product with a parameter, written by hand."""

    def __init__(self, shape, write, outputs=8):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.weight = nn.Linear(5, 8), nn.Parameter(torch.randn(shape) / 3)
        self.write, self.b = write, nn.Linear(outputs, 3)

    def forward(self, x):
        return self.b(self.write(self.weight, self.a(x).relu()).relu())


CASES = {
    "from the left": ((8, 8), lambda w, h: (w @ h.transpose(1, 2)).transpose(1, 2)),
    "einsum, inputs first": ((8, 8), lambda w, h: torch.einsum("bnc,cd->bnd", h, w)),
    "einsum, outputs first": ((8, 8), lambda w, h: torch.einsum("dc, bnc -> bnd", w, h)),
    "einsum with dots": ((8, 8), lambda w, h: torch.einsum("...c,dc->...d", h, w)),
    "einsum that turns": ((8, 8), lambda w, h: torch.einsum("bnc,dc->bdn", h, w).transpose(1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_by_hand_is_a_layer_that_is_pruned_and_refitted(name):
    model, x = Written(*CASES[name]).double().eval(), torch.randn(30, 6, 5).double()
    traced = trace(model, x)
    assert [(g.name, g.free) for g in traced.structure.groups] == [("a", 8), ("weight", 8), ("b", 0)]
    assert {consumer.name for consumer in traced.structure.consumers} == {"weight", "b"}
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast")
    assert {row.name: row.after for row in result.report.groups} == {"a": 4, "weight": 4, "b": 3}
    assert result.report.proof.difference < 1e-10


def test_heads_in_one_einsum_go_as_a_whole_or_by_their_places():
    def heads(w, h):
        q = torch.einsum("bnc,chd->bhnd", h, w)
        return ((q @ q.transpose(-1, -2)).softmax(-1) @ q).transpose(1, 2).flatten(2)

    model, x = Written((8, 4, 3), heads, outputs=12).double().eval(), torch.randn(30, 6, 5).double()
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast")
    rows = {row.name: (row.before, row.after, row.locked) for row in result.report.groups}
    assert rows["a"] == (8, 4, 0)
    assert sorted(rows.values()) == [(3, 3, 3), (4, 2, 0), (8, 4, 0)]
    assert result.report.proof.difference < 1e-10


@pytest.mark.parametrize(
    "read",
    [
        lambda w, q: torch.einsum("bhnd,nmd->bhnm", q, w),
        lambda w, q: (q.transpose(1, 2) @ w.transpose(1, 2)).transpose(1, 2),
    ],
)
def test_a_table_of_positions_that_heads_read_leaves_the_heads_free(read):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.table = nn.Linear(5, 12), nn.Linear(12, 3), nn.Parameter(torch.randn(6, 6, 3))

        def forward(self, x):
            q = self.a(x).unflatten(2, (4, 3)).transpose(1, 2)
            scores = q @ q.transpose(-1, -2) + read(self.table, q)
            return self.b((scores.softmax(-1) @ q).transpose(1, 2).flatten(2))

    model, x = Heads().double().eval(), torch.randn(30, 6, 5).double()
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast")
    row = result.report.groups[0]
    assert (row.before, row.after, row.locked) == (4, 2, 0)
    assert result.report.proof.difference < 1e-10


@pytest.mark.parametrize(
    ("shape", "write"),
    [
        ((6, 6), lambda w, h: w @ h),
        ((6, 6), lambda w, h: torch.einsum("bnc,nm->bmc", h, w)),
        ((1, 6, 6), lambda w, h: w @ h),
        ((6,), lambda w, h: torch.einsum("bnc,n->bnc", h, w)),
    ],
)
def test_what_mixes_positions_alone_leaves_the_channels_and_the_class_as_they_are(shape, write):
    model, x = Written(shape, write).double().eval(), torch.randn(30, 6, 5).double()
    result = recoup.prune(model, [x], budget=recoup.Budget(width=0.5), method="fast")
    assert {row.name: (row.after, row.locked) for row in result.report.groups} == {"a": (4, 0), "b": (3, 3)}
    assert type(result.model) is Written and result.report.proof.difference < 1e-10


def test_in_its_own_class_a_product_by_hand_locks_what_it_reads():
    structure = trace(Written(*CASES["from the left"]).eval(), torch.randn(2, 6, 5), keep_class=True).structure
    assert structure.group("a").free == 0
    assert structure.group("a").reasons[0].startswith("matmul in forward multiplies by a parameter in no layer")
