"""A module is a norm by what it computes, whatever its code looks like."""

import copy

import pytest
import torch
from torch import nn

from recoup.graph.norms_by_hand import norms_by_hand, own_norm, with_own_norms
from tests.zoo import NormByHand


def gained(norm):
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.add_(torch.randn_like(norm.weight))
    return norm


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-8])
def test_the_norm_in_its_place_computes_the_same(eps, shifted):
    module = gained(NormByHand(12, eps, shifted=shifted))
    norm = own_norm(module)
    assert type(norm) is nn.RMSNorm and norm.eps == eps
    for size in (1.0, eps**0.5, 0.01 * eps**0.5):
        x = size * torch.randn(5, 7, 12)
        torch.testing.assert_close(norm(x), module(x), rtol=1e-5, atol=1e-6)
    assert (norm.weight is module.weight) == (not shifted)


class Other(NormByHand):
    def __init__(self, how):
        super().__init__(12, 1e-5)
        self.how = how

    def forward(self, x):
        if self.how == "mean":
            x = x - x.mean(-1, keepdim=True)
        if self.how == "sum":
            return super().forward(x) * 12**0.5
        if self.how == "outside":
            return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        if self.how == "first":
            return self.weight * x * torch.rsqrt(x.square().mean(0, keepdim=True) + self.variance_epsilon)
        if self.how == "raises":
            raise ValueError
        return super().forward(x), x


@pytest.mark.parametrize("how", ["mean", "sum", "outside", "first", "raises", "tuple"])
def test_what_computes_something_else_is_none(how):
    assert own_norm(gained(Other(how))) is None


def test_what_has_more_than_a_gain_or_hooks_is_none():
    biased, buffered, watched = (gained(NormByHand(8)) for _ in range(3))
    biased.bias = nn.Parameter(torch.zeros(8))
    buffered.register_buffer("seen", torch.zeros(()))
    watched.register_forward_hook(lambda *_: None)
    named = gained(NormByHand(8))
    del named.variance_epsilon
    named.eps = "1e-6"
    assert [own_norm(module) for module in (biased, buffered, watched, named)] == [None] * 4
    assert own_norm(nn.RMSNorm(8, eps=1e-6)) is None and own_norm(nn.PReLU(8)) is None


def test_a_module_at_several_places_is_replaced_at_all_of_them():
    shared = gained(NormByHand(8))
    model = nn.Sequential(shared, nn.Linear(8, 8), shared, nn.Sequential(gained(NormByHand(8)))).eval()
    names = norms_by_hand(model)
    assert names == ("0", "3.0")
    twin = with_own_norms(copy.deepcopy(model), names)
    assert type(twin[0]) is nn.RMSNorm and twin[2] is twin[0] and type(twin[3][0]) is nn.RMSNorm
    x = torch.randn(4, 8)
    torch.testing.assert_close(twin(x), model(x))
    with pytest.raises(LookupError, match="1"):
        with_own_norms(twin, ["1"])


def test_the_random_numbers_and_the_module_stay_as_they_are():
    module, before = gained(NormByHand(8)).train(), torch.get_rng_state()
    norm = own_norm(module)
    assert torch.equal(torch.get_rng_state(), before) and module.training and norm.training
    assert module.weight.dtype == torch.float32
