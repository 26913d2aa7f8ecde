"""The CIFAR networks the command line knows: inner channels and residual streams go, and sliced equals masked."""

import pytest
import torch

import recoup
from recoup.cli.models import resnet20, resnet56


@pytest.mark.filterwarnings("ignore:.*fewer samples")
@pytest.mark.parametrize(("build", "method"), [(resnet20, "best"), (resnet56, "fast")])
def test_inner_channels_and_the_stream_of_a_zero_pad_resnet_are_pruned(build, method):
    torch.manual_seed(0)
    model = build().eval()
    budget = recoup.Budget(width=0.5)
    result = recoup.prune(model, [torch.randn(16, 3, 32, 32)], budget=budget, method=method, keep_class=False)
    assert result.report.proof.difference < 1e-10
    stream, *inner = result.report.groups
    assert (stream.before, stream.after, stream.locked) == (64, 32, 0)
    assert all(row.after == row.before // 2 for row in inner if row.locked == 0)
    assert "a standalone graph" in str(result.report)
    assert result.model(torch.randn(3, 3, 32, 32)).shape == (3, 10)
    held = recoup.trace(model, torch.randn(1, 3, 32, 32), keep_class=True)
    assert (held.form, held.structure.groups[0].free) == (None, 16)
