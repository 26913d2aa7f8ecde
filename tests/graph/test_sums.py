"""A sum or a mean over channels is a linear layer with one output, and is refitted as one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import trace
from recoup.tracing.trace import plain_cut
from tests.zoo import seeded


class ResponseNorm(nn.Module):
    """The norm of each channel over places, divided by the mean of these over channels."""

    def __init__(self, width):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        size = x.norm(p=2, dim=1, keepdim=True)
        return self.gain * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + self.shift + x


class Summed(nn.Module):
    """Linear layers with something between them that runs over channels."""

    def __init__(self, between, width=16):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(5, width), nn.Linear(width, 3), between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


class Maps(nn.Module):
    """A gate made of the mean of maps behind a batch norm, and of their sum."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.deep = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, 12, 3, groups=12)
        self.b = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        x = F.relu(self.deep(F.gelu(self.norm(self.a(x)))))
        return self.b(x * torch.sigmoid(x.mean(1, keepdim=True)) + x / (1 + x.sum(dim=(1,), keepdim=True)))


def drawn(make, *arguments):
    with seeded(0):
        model = make(*arguments).double().eval()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data += 0.3 * torch.rand_like(tensor)
    return model


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def proof(model, batch, gone, **options):
    """The proof of a smaller model without some channels of the first group, and its trace."""
    traced = trace(model, batch, **options)
    group = traced.structure.group("a")
    keep = traced.structure.keep_all()
    keep[group.start + torch.tensor(gone)] = False
    plan = plain_cut(traced, keep)
    smaller = recoup.apply(model, plan)
    return recoup.verify(model, plan, smaller, batch), traced, smaller


BETWEEN = [
    lambda x: x / (1 + x.relu().mean(-1, keepdim=True)),
    lambda x: F.gelu(x) * torch.rsqrt(F.gelu(x).square().mean(-1, keepdim=True) + 1),  # an RMSNorm by hand
    lambda x: x * (x - 3).sigmoid().sum(2, True),  # not zero for what is zero
    lambda x: x - (x.tanh() / 3).transpose(1, 2).mean(1)[..., None],
    lambda x: x * x.abs().sqrt().mean(-1)[..., None],
    lambda x: x * F.pad(x, (0, 0, 1, 1), value=1.0).mean(-1)[:, 1:-1, None],
]


@pytest.mark.parametrize("between", BETWEEN)
def test_what_runs_over_channels_is_cut_like_a_layer(between):
    model, batch = drawn(Summed, between), rows(6, 7, 5)
    found, traced, smaller = proof(model, batch, [0, 3, 7, 8])
    assert found.difference < 1e-12 and traced.structure.group("a").free == 16
    assert "runs over channels in" in traced.form.reason
    assert smaller(batch).shape == (6, 7, 3) and smaller(rows(2, 3, 5)).shape == (2, 3, 3)


def test_a_response_norm_of_convnext_is_cut():
    found, traced, _ = proof(drawn(Summed, drawn(ResponseNorm, 16)), rows(6, 7, 5), [1, 2, 12])
    assert found.difference < 1e-12 and traced.structure.group("a").free == 16


def test_maps_behind_a_batch_norm_and_a_depthwise_convolution_are_cut():
    found, traced, _ = proof(drawn(Maps), rows(4, 3, 9, 9), [0, 5])
    assert found.difference < 1e-12 and traced.structure.group("a").free == 12


@pytest.mark.parametrize("between", [*BETWEEN[:5], ResponseNorm(16)])
@pytest.mark.parametrize("method", ["fast", "best"])
def test_half_of_the_channels_copies_of_the_others_lose_nothing(method, between):
    """What is left stands for what has gone: the weights of the sum make up for it."""
    if isinstance(between, nn.Module):
        between.gain.data[8:], between.shift.data[8:] = between.gain.data[:8], between.shift.data[:8]
    with seeded(0):
        model = Summed(between).double().eval()
    with torch.no_grad():
        model.a.weight[8:], model.a.bias[8:] = model.a.weight[:8], model.a.bias[:8]
    result = recoup.prune(model, [rows(200, 7, 5)], widths={"a": 8}, method=method)
    x = rows(300, 7, 5)[200:]
    assert float((result.model(x) - model(x)).abs().max()) < 1e-5 * float(model(x).std())


def test_a_result_with_a_sum_in_it_is_saved_and_loaded(tmp_path):
    model, batch = drawn(Summed, drawn(ResponseNorm, 16)), rows(100, 7, 5)
    result = recoup.prune(model, [batch], widths={"a": 6}, method="fast")
    loaded = recoup.load(result.save(tmp_path / "result"))
    torch.testing.assert_close(loaded(batch), result.model(batch))
    again = recoup.load(tmp_path / "result", model)
    torch.testing.assert_close(again(batch), result.model(batch))


def test_the_class_alone_keeps_what_a_mean_counts():
    with pytest.raises(recoup.errors.LockedError, match="mean in between mixes channels"):
        model = drawn(Summed, drawn(ResponseNorm, 16))
        recoup.prune(model, [rows(40, 7, 5)], widths={"a": 8}, method="fast", keep_class=True)


class Stream(nn.Module):
    """What two layers make together, over the mean of its squares."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 16)

    def forward(self, x):
        x = self.a(x)
        x = x + self.c(x.relu())
        return self.b(x / (1 + x.square().mean(-1, keepdim=True)))


class Returned(Stream):
    """What is returned, weighed by its mean."""

    def forward(self, x):
        x = self.b(self.a(x).relu())
        return x * x.mean(-1, keepdim=True)


@pytest.mark.parametrize(("make", "free"), [(Stream, 0), (Returned, 16)])
def test_a_mean_over_a_stream_or_what_is_returned_is_no_layer(make, free):
    structure = trace(drawn(make), rows(6, 7, 5)).structure
    assert structure.group("a").free == free
    assert not any("mean" in product.weight for product in structure.products)


def test_a_mean_that_nobody_reads_is_no_layer():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.b = nn.MultiheadAttention(8, 4, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.b(self.attention(x, x, x, need_weights=True)[0])  # it has averaged the weights over its heads

    model, batch = drawn(Attention), rows(40, 7, 8)
    result = recoup.prune(model, [batch], budget=recoup.Budget(width=0.5), method="fast", keep_class=False)
    assert result.report.proof.difference < 1e-10


@pytest.mark.parametrize("learns", [False, True])
def test_the_weights_of_a_sum_learn_if_the_model_does(learns):
    model = drawn(Summed, BETWEEN[0]).requires_grad_(learns)
    result = recoup.prune(model, [rows(60, 7, 5)], widths={"a": 8}, method="fast")
    assert {parameter.requires_grad for parameter in result.model.parameters()} == {learns}
