"""A sum over channels is exact over fewer, where those that go are zero when it reads them."""

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


@pytest.mark.parametrize("between", [
    lambda x: x / (1 + x.relu().mean(-1, keepdim=True)),
    lambda x: F.gelu(x) * torch.rsqrt(F.gelu(x).square().mean(-1, keepdim=True) + 1),  # an RMSNorm by hand
    lambda x: x + (x * torch.sigmoid(x)).mean(2, True),  # one factor that is zero is enough
    lambda x: x - (x.tanh() / 3).transpose(1, 2).mean(1)[..., None],
    lambda x: x * x.abs().sqrt().mean(-1)[..., None],
])  # fmt: skip
def test_a_mean_over_channels_that_are_zero_when_they_go_counts_them(between):
    model, batch = drawn(Summed, between), rows(6, 7, 5)
    found, traced, smaller = proof(model, batch, [0, 3, 7, 8])
    assert found.difference < 1e-12 and traced.structure.group("a").free == 16
    assert "mean over channels" in traced.form.reason  # the class would divide by what is left
    assert smaller(batch).shape == (6, 7, 3)


def test_a_response_norm_of_convnext_is_cut():
    found, traced, _ = proof(drawn(Summed, drawn(ResponseNorm, 16)), rows(6, 7, 5), [1, 2, 12])
    assert found.difference < 1e-12 and traced.structure.group("a").free == 16


def test_maps_behind_a_batch_norm_and_a_depthwise_convolution_are_cut():
    found, traced, _ = proof(drawn(Maps), rows(4, 3, 9, 9), [0, 5])
    assert found.difference < 1e-12 and traced.structure.group("a").free == 12


def test_a_sum_needs_no_other_form():
    found, traced, smaller = proof(
        drawn(Summed, lambda x: x / (2 + x.relu().sum(-1, keepdim=True))), rows(6, 7, 5), [4]
    )
    assert found.difference < 1e-12 and traced.form is None and type(smaller) is Summed


@pytest.mark.parametrize(("between", "named"), [
    (lambda x: x * x.sigmoid().mean(-1, keepdim=True), "sigmoid in forward comes before it"),
    (lambda x: x * (x + 1).mean(-1, keepdim=True), "add in forward comes before it"),
    (lambda x: x * x.exp().sum(-1, keepdim=True), "exp in forward comes before it"),
    (lambda x: x / (1e-3 / (1 + x.abs())).mean(-1, keepdim=True), "comes before it"),
    (lambda x: x * F.pad(x, (0, 0, 1, 1), value=1.0).mean(-1).mean(-1)[:, None, None], "pad in forward"),
    (lambda x: x * (x / (x.abs() + x)).mean(-1, keepdim=True), "div in forward comes before it"),  # zero by zero
    (lambda x: x * x.softmax(1).mean(-1, keepdim=True), "softmax in forward comes before it"),
    (lambda x: x * (x + x.sum(-1, keepdim=True)).mean(-1, keepdim=True), "sum in forward comes before it"),
])  # fmt: skip
def test_what_is_not_zero_with_its_layer_stays(between, named):
    with pytest.raises(recoup.errors.LockedError, match=named):
        recoup.prune(drawn(Summed, between), [rows(40, 7, 5)], budget=recoup.Budget(macs=0.6), method="fast")


def test_products_of_products_are_looked_at_once():
    def between(x):
        y = x + 1
        for _ in range(40):
            y = y * y.sin()
        return x * y.mean(-1, keepdim=True)

    assert trace(drawn(Summed, between), rows(6, 7, 5)).structure.group("a").free == 0


def test_zeros_beside_do_no_harm():
    found, _, _ = proof(drawn(Summed, lambda x: x * F.pad(x, (0, 0, 1, 1)).mean(-1)[:, 1:-1, None]), rows(6, 7, 5), [3])
    assert found.difference < 1e-12


def test_what_else_is_added_has_to_go_too():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.each = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x * (x + self.each).mean(-1, keepdim=True) * (x + self.one).sum(-1, keepdim=True)

    with pytest.raises(recoup.errors.LockedError, match="one is not cut with it"):
        recoup.prune(drawn(Summed, Beside()), [rows(40, 7, 5)], budget=recoup.Budget(macs=0.6), method="fast")

    Beside.forward = lambda self, x: x * (x + self.each).mean(-1, keepdim=True)
    found, _, _ = proof(drawn(Summed, Beside()), rows(6, 7, 5), [0, 9])
    assert found.difference < 1e-12


@pytest.mark.parametrize("options", [{"keep_class": True}, {}])
@pytest.mark.parametrize("method", ["fast", "best"])
def test_half_of_the_channels_copies_of_the_others_lose_nothing(method, options):
    """What goes would change the mean; weights that read the sum make up for it."""
    model = drawn(Summed, lambda x: x.relu() / (1 + x.relu().sum(-1, keepdim=True)))
    with torch.no_grad():
        model.a.weight[8:], model.a.bias[8:] = 0, 0  # units that say nothing, and take part in the sum
    result = recoup.prune(model, [rows(200, 7, 5)], budget=recoup.Budget(macs=0.6), method=method, **options)
    x = rows(300, 7, 5)[200:]
    assert float((result.model(x) - model(x)).abs().max()) < 1e-6


def test_the_class_alone_keeps_what_a_mean_counts():
    with pytest.raises(recoup.errors.LockedError, match="mean in between mixes channels"):
        model = drawn(Summed, drawn(ResponseNorm, 16))
        recoup.prune(model, [rows(40, 7, 5)], budget=recoup.Budget(macs=0.6), method="fast", keep_class=True)
