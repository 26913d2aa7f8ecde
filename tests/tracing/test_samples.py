"""Batches whose first dim is time are refused; modules that take sequences first are fine inside a model that turns."""

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import CaptureError


class Sequences(nn.Module):
    """An LSTM or a transformer's layer between two linear ones; `turns` is where a sequence is turned before it."""

    def __init__(self, middle, read, turns=False):
        super().__init__()
        self.a, self.middle, self.head = nn.Linear(6, 16), middle, nn.Linear(16, 3)
        self.read, self.turns = read, turns

    def forward(self, x):
        h = self.a(x)
        h = self.middle(h.transpose(0, 1) if self.turns else h)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(self.read(h))


def layer(batch_first=False):
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)


READS = {"every step": lambda h: h, "the last step": lambda h: h[-1], "the mean": lambda h: h.mean(0)}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", [layer, lambda: nn.LSTM(16, 16), lambda: nn.GRU(16, 16)])
def test_steps_along_the_first_dim_are_refused_with_what_to_do(make, read):
    model = Sequences(make(), READS[read]).eval()
    with pytest.raises(CaptureError, match=r"do not follow the first dimension.*middle.*batch_first=False.*transpose"):
        recoup.inspect(model, torch.randn(12, 5, 6))


@pytest.mark.parametrize(
    "model",
    [
        Sequences(layer(), lambda h: h.mean(0), turns=True),
        Sequences(layer(), lambda h: h.transpose(0, 1), turns=True),
        Sequences(nn.LSTM(16, 16), lambda h: h[-1], turns=True),
        Sequences(layer(batch_first=True), lambda h: h),
        Sequences(nn.LSTM(16, 16, batch_first=True), lambda h: h[:, -1]),
    ],
)
def test_samples_along_the_first_dim_are_not(model):
    assert recoup.inspect(model.eval(), torch.randn(12, 5, 6)).groups


def test_one_sample_tells_nothing_and_is_taken():
    assert recoup.inspect(Sequences(layer(), READS["every step"]).eval(), torch.randn(1, 5, 6)).groups
