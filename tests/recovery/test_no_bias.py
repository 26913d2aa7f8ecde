"""A layer without a bias is given one where its mean moves, and none where only rounding would be written."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup

METHODS = [
    recoup.Paper(ridge=1e-8, positions=None),
    recoup.Released(ridge=1e-8, positions=None),
    recoup.Fast(ridge=1e-8, positions=None),
    recoup.Best(ridge=1e-8, positions=None),
]


class Directed(nn.Module):
    """Copies of channels, a layer without a bias, and only the direction of what it gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 12, bias=False), nn.Linear(12, 3)
        with torch.no_grad():
            self.first.weight[4:] = self.first.weight[:4].clone()
            self.first.bias.fill_(-0.3)  # for one image in ten nothing is left

    def forward(self, x):
        return self.last(F.normalize(F.relu(self.middle(F.relu(self.first(x)))), dim=-1))


def images(count, seed):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_what_gives_zero_gives_zero_afterwards(method):
    model, seen = Directed().eval(), [images(60, seed) for seed in range(2)]
    result = recoup.prune(model, seen, widths={"first": 4}, method=method)
    new = images(500, 9)
    with torch.no_grad():
        dead = (model.first(new) <= 0).all(1)
        expected, actual = model(new), result.model(new)
    assert 20 < int(dead.sum()) < 250
    torch.testing.assert_close(actual[dead], expected[dead])
    assert float((actual - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("method", METHODS[:3], ids=lambda method: type(method).__name__)
def test_a_mean_that_moves_is_still_put_into_a_new_bias(method):
    model = Directed().eval()
    with torch.no_grad():
        model.first.weight[4:].normal_()  # no copies: what goes is missed
        model.first.bias.fill_(2.0)
    result = recoup.prune(model, [images(60, seed) for seed in range(2)], widths={"first": 4}, method=method)
    assert float(result.model.middle.bias.detach().abs().min()) > 1e-4
