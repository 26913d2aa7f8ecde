"""Channels of a stream under a norm can go, if what makes them is all that it is a sum of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import trace
from recoup.errors import VerificationError
from recoup.plan import Centred, centre
from recoup.tracing.trace import plain_cut
from tests.zoo import Transformer, seeded

NORMS = [nn.RMSNorm, nn.LayerNorm]


def with_noise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def transformer(norm):
    with seeded(0):
        return with_noise(Transformer(norm))


def tokens(samples=12):
    return torch.randint(13, (samples, 6), generator=torch.Generator().manual_seed(1))


def without(traced, *channels):
    keep = traced.structure.keep_all()
    keep[traced.structure.group("tokens").start + torch.tensor(channels)] = False
    return keep


@pytest.mark.parametrize("norm", NORMS)
def test_a_stream_is_free_only_if_asked_for(norm):
    group = trace(transformer(norm), tokens()).structure.group("tokens")
    assert not group.free and "norm in norms.0 normalises over channels" in group.reasons[0]
    traced = trace(transformer(norm), tokens(), streams=True)
    group = traced.structure.group("tokens")
    assert group.free == group.width == 16 and traced.form is None
    assert group.consumers == (*(f"into.{i}" for i in range(5)), "head")


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_left_computes_what_the_masked_original_does(norm):
    model = transformer(norm)
    traced = trace(model, tokens(), streams=True)
    plan = plain_cut(traced, without(traced, 0, 3, 7, 8, 15))
    smaller = recoup.apply(model, plan)
    assert recoup.verify(model, plan, smaller, tokens()).difference < 1e-10
    assert type(smaller) is Transformer and smaller.norms[3].normalized_shape == (11,)
    if norm is nn.LayerNorm:  # torch's own RMSNorm has no epsilon by default
        assert smaller.norms[0].eps == pytest.approx(1e-5 * 16 / 11)
    assert smaller.places.shape == (6, 11) and smaller.tokens.weight.shape == (13, 11)


def test_channels_that_are_zero_change_nothing_but_the_scale():
    """By hand: a norm over the rest, its gain times sqrt(16 / 12), its epsilon times 16 / 12."""
    model = transformer(lambda width: nn.RMSNorm(width, eps=0.3))
    gone = torch.tensor([1, 2, 11, 14])
    with torch.no_grad():
        model.tokens.weight[:, gone], model.places[:, gone] = 0, 0
        for layer in model.out:
            layer.weight[gone], layer.bias[gone] = 0, 0
    traced = trace(model, tokens(), streams=True)
    plan = plain_cut(traced, without(traced, *gone.tolist()))
    smaller = recoup.apply(model, plan)
    torch.testing.assert_close(smaller(tokens()), model(tokens()), rtol=1e-4, atol=1e-5)
    kept = torch.ones(16, dtype=torch.bool).index_fill(0, gone, False)
    torch.testing.assert_close(smaller.norms[0].weight, model.norms[0].weight[kept] * (16 / 12) ** 0.5)
    assert smaller.norms[0].eps == pytest.approx(0.3 * 16 / 12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wrong", ["factor", "epsilon", "maker"])
def test_the_proof_sees_wrong_statistics(norm, wrong):
    model = transformer(lambda width: norm(width, eps=0.1))
    traced = trace(model, tokens(), streams=True)
    plan = plain_cut(traced, without(traced, 2, 5))
    smaller = recoup.apply(model, plan)
    with torch.no_grad():
        if wrong == "factor":
            smaller.norms[1].weight *= 1 + 1e-5
        elif wrong == "epsilon":
            smaller.norms[1].eps = 0.1
        else:
            smaller.out[0].weight[3, 3] += 1e-3
    with pytest.raises(VerificationError, match="differs from the masked original"):
        recoup.verify(model, plan, smaller, tokens())


class Before(nn.Module):
    """A norm with something between it and the layer."""

    def __init__(self, norm, between):
        super().__init__()
        self.first, self.norm, self.last, self.between = nn.Linear(5, 8), norm(8), nn.Linear(8, 3), between
        self.scale, self.deep = nn.Parameter(torch.rand(8) + 1), nn.Conv1d(8, 8, 1, groups=8)

    def forward(self, x):
        return self.last(self.norm(self.between(self, self.first(x))))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("between", "named"),
    [
        (lambda net, x: F.gelu(x), "gelu in forward comes before it"),
        (lambda net, x: x * net.scale, "mul in forward comes before it"),
        (lambda net, x: x + 1.0, "add in forward comes before it"),
        (lambda net, x: net.norm(x), "norm in norm comes before it"),
        (lambda net, x: net.deep(x[..., None])[..., 0], "conv1d in deep comes before it"),
        (lambda net, x: x + net.norm.weight, "norm.weight is read by others too"),
    ],
)
def test_anything_but_a_sum_of_layers_locks(norm, between, named):
    reasons = trace(Before(norm, between), torch.randn(4, 5), streams=True).structure.group("first").reasons
    assert any("normalises over channels" in reason and named in reason for reason in reasons), reasons


def test_a_fixed_precision_holds_what_has_to_be_centred():
    """The proof runs in float64, where a sum that was rounded before is not zero."""
    cast = Before(nn.LayerNorm, lambda net, x: x.to(torch.float32))
    reasons = trace(cast, torch.randn(4, 5), streams=True).structure.group("first").reasons
    assert any("to in forward fixes its precision" in reason for reason in reasons), reasons
    cast = Before(nn.RMSNorm, lambda net, x: x.to(torch.float32))
    assert trace(cast, torch.randn(4, 5), streams=True).structure.group("first").free == 8


@pytest.mark.parametrize("between", [lambda net, x: x, lambda net, x: 2 * x.view(-1, 8) + F.dropout(x, training=False)])
def test_a_sum_of_layers_does_not(between):
    structure = trace(Before(nn.LayerNorm, between), torch.randn(4, 5), streams=True).structure
    assert structure.group("first").free == 8


def test_a_norm_without_a_gain_holds_its_channels():
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 3))
    reasons = trace(model, torch.randn(4, 5), streams=True).structure.group("0").reasons
    assert reasons[0] == "layer_norm in 1 normalises over channels without a gain of its own"


class Part(nn.Module):
    """A LayerNorm that sees half of what a layer makes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(4), nn.Linear(8, 3)

    def forward(self, x):
        left, right = self.first(x).chunk(2, dim=-1)
        return self.last(torch.cat([self.norm(left), right], dim=-1))


def test_half_a_stream_is_not_centred_by_itself():
    reasons = trace(Part(), torch.randn(4, 5), streams=True).structure.group("first").reasons
    assert "layer_norm in norm normalises over channels: it sees a part of them" in reasons


class Classes(nn.Module):
    """A class token beside patches, which the norm meets before anything says that they have the same channels."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Linear(5, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.places, self.norm, self.last = nn.Parameter(torch.randn(1, 4, 8)), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1) + self.places
        return self.last(self.norm(x)[:, 0])


def test_a_class_token_is_no_head():
    model, x = Classes().eval(), torch.randn(4, 3, 5)
    traced = trace(model, x, streams=True)
    group = traced.structure.group("patches")
    assert group.width == group.free == 8
    keep = traced.structure.keep_all()
    keep[group.start : group.start + 3] = False
    plan = plain_cut(traced, keep)
    assert recoup.verify(model, plan, recoup.apply(model, plan), x).difference < 1e-10


def test_norms_within_heads_leave_heads_what_they_are():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 12), nn.LayerNorm(4), nn.Linear(12, 3)

        def forward(self, x):
            return self.last(self.norm(self.first(x).view(-1, 3, 4)).flatten(1))

    for streams in (False, True):
        group = trace(Heads(), torch.randn(4, 5), streams=streams).structure.group("first")
        assert (group.width, group.free) == (3, 3)


def test_centred_values_have_no_mean():
    value = torch.randn(3, 5)
    after = centre(value, Centred("", 1, torch.tensor([0, 2, 4])))
    torch.testing.assert_close(after[:, [0, 2, 4]].sum(1), torch.zeros(3))
    assert torch.equal(after[:, [1, 3]], value[:, [1, 3]])
