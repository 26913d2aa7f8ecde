"""A rotated model computes what it did; the least components of its streams go without loss."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ArtefactError, LockedError
from recoup.statistics.rotation import basis
from recoup.tracing.trace import plain_cut
from tests.zoo import NormByHand, Transformer, plain, seeded

NORMS = [nn.RMSNorm, nn.LayerNorm, NormByHand, partial(NormByHand, shifted=True)]


def transformer(norm):
    """With gains and shifts of its own."""
    with seeded(0), torch.no_grad():
        model = Transformer(norm)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def tokens(samples=64):
    return torch.randint(13, (samples, 6), generator=torch.Generator().manual_seed(1))


def dependent(norm):
    """What makes the stream has half as many dimensions as the stream has channels."""
    model = transformer(norm)
    span = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    span[:, 0] = 1  # a LayerNorm does not see that one
    Q = torch.linalg.qr(span.double()).Q
    projection = (Q @ Q.T).float()
    with torch.no_grad():
        model.tokens.weight.copy_(model.tokens.weight @ projection)
        model.places.copy_(model.places @ projection)
        for layer in model.out:
            layer.weight.copy_(projection @ layer.weight)
            layer.bias.copy_(projection @ layer.bias)
    return model


@pytest.mark.parametrize("norm", NORMS)
def test_a_rotated_model_computes_the_same(norm):
    model = transformer(norm)
    before = copy.deepcopy(model.state_dict())
    rotated = recoup.rotate(model, [tokens()])
    assert type(rotated) is Transformer
    torch.testing.assert_close(rotated(tokens()), model(tokens()), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.allclose(rotated.tokens.weight, model.tokens.weight, atol=0.1)
    assert all(torch.equal(norm.weight, torch.ones(16)) for norm in rotated.norms)
    assert (rotated.head.bias is None) == (norm is not nn.LayerNorm)  # it takes in what the last LayerNorm adds


@pytest.mark.parametrize("norm", NORMS)
def test_the_last_channels_carry_the_least(norm):
    rotated = recoup.rotate(transformer(norm), [tokens()])
    seen = []
    for layer in rotated.norms:
        layer.register_forward_hook(lambda _, __, result: seen.append(result.flatten(0, -2)))
    rotated(tokens())
    sizes = torch.cat(seen).detach().square().mean(0)
    assert sizes[:4].sum() > 4 * sizes[-4:].sum()
    if norm is nn.RMSNorm:
        assert (sizes.diff() <= 1e-3).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_stream_of_half_as_many_dimensions_loses_nothing_at_half_width(norm):
    model = dependent(norm)
    result = recoup.prune(model, [tokens()], widths={"tokens": 8}, method="fast", streams=True)
    assert result.model.places.shape == (6, 8)
    expected = model(tokens())
    assert float((result.model(tokens()) - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("norm", NORMS)
def test_channels_without_rotation_cannot_go_for_nothing(norm):
    model = dependent(norm)
    traced = recoup.trace(model, tokens(), streams=True)
    keep = traced.structure.keep_all()
    keep[traced.structure.group("tokens").start + torch.arange(8, 16)] = False
    expected = model(tokens())
    smaller = recoup.apply(model, plain_cut(traced, keep))
    assert float((smaller(tokens()) - expected).norm() / expected.norm()) > 0.1


def test_principal_components():
    x = torch.randn(500, 6, dtype=torch.float64) * torch.tensor([1, 5, 0.1, 2, 0.01, 3], dtype=torch.float64)
    R = basis(x.T @ x / 500, is_centred=False)
    torch.testing.assert_close(R @ R.T, torch.eye(6, dtype=torch.float64))
    moments = R @ (x.T @ x / 500) @ R.T
    assert (moments.diagonal().diff() < 0).all() and (moments - moments.diagonal().diag()).abs().max() < 1e-8


def test_centred_components_fit_into_the_first_channels():
    x = torch.randn(500, 3, dtype=torch.float64) @ torch.randn(3, 7, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True)
    R = basis(x.T @ x / 500, is_centred=True)
    y = x @ R.T
    torch.testing.assert_close(y.sum(1), torch.zeros(500, dtype=torch.float64), atol=1e-10, rtol=0)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    assert y[:, 4:].abs().max() < 1e-8 < y[:, 3].abs().max()  # three dimensions, in channels that add up to zero


class Tied(nn.Module):
    """The table of tokens makes the scores too."""

    def __init__(self, after=lambda x: x, norm=nn.RMSNorm):
        super().__init__()
        self.tokens, self.norm, self.mid = nn.Embedding(13, 8), norm(8), nn.Linear(8, 8)
        self.head, self.after = nn.Linear(8, 13, bias=False), after
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x)
        return self.head(self.after(self.norm(x + self.mid(self.norm(x)))))[:, -1]


def test_tied_embeddings_are_untied():
    model = Tied().eval()
    rotated = recoup.rotate(model, [tokens()])
    assert rotated.head.weight is not rotated.tokens.weight and model.head.weight is model.tokens.weight
    torch.testing.assert_close(rotated(tokens()), model(tokens()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("after", "named"),
    [(F.gelu, "gelu in forward is not linear in it"), (lambda x: x * x.detach(), "mul in forward is not linear in it")],
)
def test_what_is_not_linear_is_refused(after, named):
    with pytest.raises(LockedError, match=named):
        recoup.rotate(Tied(after), [tokens()])


def test_a_network_without_streams_is_refused():
    with pytest.raises(LockedError, match="Sequential has no stream that can be turned; no LayerNorm or RMSNorm"):
        recoup.rotate(plain(6), [torch.randn(4, 3, 8, 8)])


@pytest.mark.parametrize("norm", NORMS)
def test_the_default_prunes_streams_and_leaves_the_model_alone(norm):
    model = transformer(norm)
    before = copy.deepcopy(model.state_dict())
    result = recoup.prune(model, [tokens()], widths={"tokens": 9}, streams=True)
    assert result.model.head.in_features == 9 and result.report.proof.difference < 1e-10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = recoup.apply(model, result.plan)
    torch.testing.assert_close(again(tokens()), result.model(tokens()))


@pytest.mark.parametrize("norm", NORMS)
def test_a_result_with_a_smaller_stream_is_saved_and_loaded(tmp_path, norm):
    model = transformer(norm)
    result = recoup.prune(model, [tokens()], widths={"tokens": 9}, method="fast", streams=True)
    loaded = recoup.load(result.save(tmp_path / "result"), model)
    before = 1e-6 if norm not in (nn.RMSNorm, nn.LayerNorm) else model.norms[0].eps or 0.0
    assert loaded.norms[0].eps == result.model.norms[0].eps and (loaded.norms[0].eps or 1.0) > before
    torch.testing.assert_close(loaded(tokens()), result.model(tokens()))


def test_norms_by_hand_are_told_of_and_the_callers_stay():
    model = transformer(NormByHand)
    result = recoup.prune(model, [tokens()], widths={"tokens": 9}, method="fast", streams=True)
    assert result.plan.norms == ("norms.0", "norms.1", "norms.2", "norms.3")
    assert any("norms.0 and 3 more: RMSNorms that the code writes out" in note for note in result.report.notes)
    assert all(isinstance(norm, nn.RMSNorm) for norm in result.model.norms)
    assert all(isinstance(norm, NormByHand) for norm in model.norms)
    plain_result = recoup.prune(model, [tokens()], budget=recoup.Budget(macs=0.8), method="fast")
    assert not plain_result.plan.norms and all(isinstance(norm, NormByHand) for norm in plain_result.model.norms)


def test_a_model_without_these_norms_is_refused(tmp_path):
    result = recoup.prune(transformer(NormByHand), [tokens()], widths={"tokens": 9}, method="fast", streams=True)
    folder = result.save(tmp_path / "result")
    with pytest.raises(ArtefactError, match=r"the model has no norms\.0"):
        recoup.load(folder, transformer(nn.RMSNorm), check=False)


class Scaled(nn.Module):
    """Tables times a number that the model stores, as some language models have it."""

    def __init__(self, number):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(13, 8), nn.RMSNorm(8), nn.Linear(8, 13)
        self.register_buffer("number", number)

    def forward(self, x):
        return self.head(self.norm(self.tokens(x) * self.number.to(self.tokens.weight.dtype)))[:, -1]


def test_a_stored_number_scales_a_stream():
    model = Scaled(torch.tensor(3.0)).eval()
    torch.testing.assert_close(recoup.rotate(model, [tokens()])(tokens()), model(tokens()), rtol=1e-4, atol=1e-5)
    with pytest.raises(LockedError, match="mul in forward"):
        recoup.rotate(Scaled(torch.rand(8)).eval(), [tokens()])
