import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import nn

from recoup.algebra import patches
from recoup.algebra.patches import Window, patch_rows, sample_positions
from recoup.operators.convolution import window_of
from tests.oracles import unfolded


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    per_dim = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    kernel, dilation = per_dim(1, 3), per_dim(1, 2)
    by_name = draw(st.booleans())
    padding = draw(st.sampled_from(["same", "valid"])) if by_name else per_dim(0, 2)
    stride = (1,) * dims if by_name else per_dim(1, 3)
    conv = kind(2, 3, kernel, stride=stride, padding=padding, dilation=dilation, bias=False).double()
    return conv, torch.randn(3, 2, *per_dim(5, 7), dtype=torch.float64)


@given(convolutions())
@settings(max_examples=60, deadline=None)
def test_patches_times_weight_is_the_convolution(case):
    conv, x = case
    window = window_of({"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}, conv.kernel_size)
    expected = conv(x)
    assert window.reach(tuple(x.shape[2:])) == tuple(expected.shape[2:])
    positions = torch.arange(expected[0, 0].numel())
    rows = torch.cat([part for _, part in patch_rows(x, window, positions)])
    torch.testing.assert_close(rows, unfolded(x, conv))
    y = rows @ conv.weight.flatten(1).T
    torch.testing.assert_close(y, expected.flatten(2).transpose(1, 2).flatten(0, 1))


def test_chunks_cover_every_sample_once(monkeypatch):
    monkeypatch.setattr(patches, "CHUNK_VALUES", 100)
    x = torch.randn(7, 2, 4, 4)
    window = Window((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    parts = list(patch_rows(x, window, torch.arange(16)))
    assert len(parts) == 7
    whole = torch.cat([rows for _, rows in parts])
    monkeypatch.undo()
    assert torch.equal(whole, next(patch_rows(x, window, torch.arange(16)))[1])


def test_sampled_positions_are_distinct_and_the_rows_are_theirs():
    generator = torch.Generator().manual_seed(0)
    positions = sample_positions(100, 10, generator)
    assert len(positions.unique()) == 10
    assert not torch.equal(positions, sample_positions(100, 10, generator))
    assert torch.equal(sample_positions(5, 10, generator), torch.arange(5))
    assert torch.equal(sample_positions(5, None, generator), torch.arange(5))
    x = torch.randn(2, 1, 10, 10)
    window = Window((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)))
    (_, rows), *_ = patch_rows(x, window, positions)
    assert torch.equal(rows.view(2, 10), x.flatten(1)[:, positions])
