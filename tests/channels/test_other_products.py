"""Multiply-accumulates outside of layers: what torch counts while a network runs, whole and cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.channels.cost import cost
from recoup.channels.cost_model import macs_model
from recoup.tracing.trace import plain_cut
from tests.channels.test_cost_model import keep_of, random_counts, random_orders
from tests.zoo import seeded

LENGTH, SAMPLES = 7, 3


def counted(model, x):
    """For one sample, without the fused forms that the counter does not see into."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return counter.get_total_flops() // 2 // len(x)


class Mixes(nn.Module):
    """Tokens of 8, queries, keys and values by linear layers, and a way to put them together."""

    def __init__(self, mix, widths=(32, 32, 32), out=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, width) for width in widths)
        self.mix, self.last = mix, nn.Linear(out, 5)

    def forward(self, x):
        return self.last(self.mix(self.q(x), self.k(x), self.v(x))).mean(1)


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def fused(q, k, v):
    return F.scaled_dot_product_attention(heads(q, 4), heads(k, 4), heads(v, 4)).transpose(1, 2).flatten(2)


def masked(q, k, v):
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    made = F.scaled_dot_product_attention(heads(q, 4), heads(k, 4), heads(v, 4), attn_mask=mask)
    return made.transpose(1, 2).flatten(2)


def grouped(q, k, v):
    made = F.scaled_dot_product_attention(heads(q, 4), heads(k, 2), heads(v, 2), enable_gqa=True)
    return made.transpose(1, 2).flatten(2)


def written_out(q, k, v):
    scores = (heads(q, 4) @ heads(k, 4).transpose(-1, -2)).softmax(-1)
    return (scores @ heads(v, 4)).transpose(1, 2).flatten(2)


def linear_attention(q, k, v):
    """Keys by values first: channels by channels, so that two widths count."""
    return q.relu() @ (k.relu().transpose(1, 2) @ v)


def across_channels(q, k, v):
    """A matrix of channels by channels, as in cross-covariance attention."""
    scores = (heads(q, 4).transpose(-1, -2) @ heads(k, 4)).softmax(-1)
    return (heads(v, 4) @ scores.transpose(-1, -2)).transpose(1, 2).flatten(2)


def by_letters(q, k, v):
    scores = torch.einsum("bihc,bjhc->bhij", q.unflatten(-1, (4, 8)), k.unflatten(-1, (4, 8))).softmax(-1)
    return torch.einsum("bhij,bjhc->bihc", scores, v.unflatten(-1, (4, 8))).flatten(2)


def with_a_vector(q, k, v):
    return v * torch.matmul(q.unsqueeze(-2), k.unsqueeze(-1)).squeeze(-1)


class Projected(nn.Module):
    """Cells that project their hidden units, which no rule takes apart."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(16, 5)
        self.cells = nn.LSTM(32, 16, batch_first=True, num_layers=2, bidirectional=True, proj_size=8)

    def forward(self, x):
        return self.last(self.cells(self.first(x).relu())[0].mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 5)
        self.body = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x):
        return self.last(self.body(self.first(x)).mean(1))


class Computed(nn.Module):
    """A linear layer whose weight another layer makes."""

    def __init__(self):
        super().__init__()
        self.first, self.makes, self.last = nn.Linear(8, 12), nn.Linear(8, 12 * 6), nn.Linear(6, 5)

    def forward(self, x):
        weight = self.makes(x.mean(1)).unflatten(1, (6, 12))
        return self.last(torch.baddbmm(x[..., :6], self.first(x).relu(), weight.transpose(1, 2)).mean(1))


NETWORKS = {
    "fused": lambda: Mixes(fused),
    "masked": lambda: Mixes(masked),
    "grouped": lambda: Mixes(grouped, (32, 16, 16)),
    "written out": lambda: Mixes(written_out),
    "linear attention": lambda: Mixes(linear_attention, (24, 24, 32)),
    "across channels": lambda: Mixes(across_channels),
    "by letters": lambda: Mixes(by_letters),
    "with a vector": lambda: Mixes(with_a_vector),
    "encoder": Encoder,
    "computed": Computed,
}


def traced(name):
    with seeded(0):
        model, x = NETWORKS[name]().eval(), torch.randn(SAMPLES, LENGTH, 8)
    return model, x, recoup.trace(model, x)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_macs_are_those_that_torch_counts_while_the_network_runs(name, seed):
    model, x, found = traced(name)
    structure = found.structure
    assert cost(structure, found.host).macs == counted(model, x) > sum(other.macs for other in structure.others) > 0
    orders, counts = random_orders(structure, seed), random_counts(structure, seed)
    keep = structure.refill(keep_of(structure, orders, counts), torch.arange(structure.width))
    smaller = recoup.apply(model, plain_cut(found, keep))
    assert cost(structure, found.host, keep).macs == counted(smaller, x)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_model_of_the_cost_is_the_cost_of_the_mask(name):
    _, _, found = traced(name)
    structure = found.structure
    for seed in range(4):
        orders, counts = random_orders(structure, seed), random_counts(structure, seed)
        expected = cost(structure, found.host, keep_of(structure, orders, counts)).macs
        assert macs_model(structure, orders).total(counts) == pytest.approx(expected, rel=1e-12)


def test_cells_that_torch_does_not_count_on_a_cpu_are_counted_by_their_matrices():
    with seeded(0):
        model, x = Projected().eval(), torch.randn(SAMPLES, LENGTH, 8)
    (cells,) = recoup.trace(model, x).structure.others
    matrices = sum(p.numel() for name, p in model.cells.named_parameters() if "weight" in name)
    assert cells.macs == LENGTH * matrices and cells.sides == ()


def test_a_budget_means_all_macs():
    """Half of the layers is not half of a network whose attention stays."""
    with seeded(0):
        model, data = Mixes(written_out).eval(), [torch.randn(60, 40, 8)]
    result = recoup.prune(model, data, budget=recoup.Budget(macs=0.5), method="fast")
    assert counted(result.model, data[0]) <= 0.5 * counted(model, data[0])
    assert result.report.after.macs == counted(result.model, data[0])


def test_inspect_names_what_is_multiplied_in_no_layer():
    with seeded(0):
        model, x = Projected().eval(), torch.randn(SAMPLES, LENGTH, 8)
    seen = recoup.inspect(model, x)
    (cells,) = seen.operations
    assert (cells.site, cells.is_fixed) == ("lstm in cells", True)
    assert cells.macs_share == cells.macs / seen.cost.macs
    assert f"in no layer: lstm in cells, {cells.macs:,} MACs" in str(seen) and "stays whatever is pruned" in str(seen)
    assert seen.to_json()["operations"][0]["site"] == "lstm in cells"
    model, x, _ = traced("fused")
    (attention,) = recoup.inspect(model, x).operations
    assert not attention.is_fixed and "shrinks with what it reads" in str(recoup.inspect(model, x))


class LowRank(nn.Module):
    """A weight that is computed from two, and a value in another shape that nobody reads."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (
            nn.Linear(5, 12),
            nn.Parameter(torch.randn(8, 4)),
            nn.Parameter(torch.randn(4, 12)),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x).relu()
        (x + 1).view(len(x), 3, 4).mean(dim=2)
        return self.head(F.linear(x, self.left @ self.right).relu())


@pytest.mark.parametrize("keep_class", [True, False])
def test_a_weight_that_is_computed_costs_nothing_per_sample(keep_class):
    with seeded(0):
        model, x = LowRank().eval(), torch.randn(SAMPLES, 5)
    traced = recoup.trace(model, x, keep_class=keep_class)
    assert cost(traced.structure, traced.host).macs == 5 * 12 + 12 * 8 + 8 * 3
