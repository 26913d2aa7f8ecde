"""Mixtures of experts: hidden units inside experts that all run, and experts that lie in one tensor."""

import pytest
import torch
from torch import nn

import recoup
from tests.zoo import seeded

HIDDEN = 8


class Mixture(nn.Module):
    """All experts run; a softmax over the gate's scores weighs what they say."""

    def __init__(self, experts=3):
        super().__init__()
        made = (nn.Sequential(nn.Linear(6, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 5)) for _ in range(experts))
        self.gate, self.experts, self.head = nn.Linear(6, experts), nn.ModuleList(made), nn.Linear(5, 4)

    def forward(self, x):
        said = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.head((said * self.gate(x).softmax(-1).unsqueeze(-2)).sum(-1))


class Stacked(nn.Module):
    """Every row goes to one of two experts, whose weights are one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(2, 16, 32)), nn.Parameter(torch.randn(2, 32, 16))
        self.register_buffer("ends", torch.tensor([3, 7], dtype=torch.int32))

    def forward(self, x):
        rows = self.first(x).flatten(0, 1)
        hidden = torch._grouped_mm(rows, self.up, offs=self.ends).relu()
        return self.head(torch._grouped_mm(hidden, self.down, offs=self.ends)).unflatten(0, (len(x), -1))


@pytest.mark.parametrize("method", ["best", recoup.Paper(ridge=1e-12, weighting="none", classifier=True)])
def test_hidden_units_inside_experts_go_expert_by_expert(method):
    with seeded(0):
        model, x = Mixture().double().eval(), torch.randn(200, 6).double()
    with torch.no_grad():
        for first, *_ in model.experts:
            first.weight[HIDDEN // 2 :], first.bias[HIDDEN // 2 :] = (
                first.weight[: HIDDEN // 2],
                first.bias[: HIDDEN // 2],
            )
    widths = {f"experts.{number}.0": HIDDEN // 2 for number in range(3)}
    result = recoup.prune(model, [x], widths=widths, only=list(widths), method=method)
    assert [expert[0].out_features for expert in result.model.experts] == [HIDDEN // 2] * 3
    assert result.model.gate.out_features == 3
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x), rtol=1e-6, atol=1e-6)


def test_the_gate_stays_and_says_why():
    with seeded(0):
        said = str(recoup.inspect(Mixture().eval(), torch.randn(2, 6)))
    assert "softmax in forward runs over channels" in said


def test_experts_in_one_tensor_stay_by_name_and_are_counted():
    with seeded(0):
        seen = recoup.inspect(Stacked().bfloat16().eval(), torch.randn(1, 7, 6).bfloat16())
    assert "_grouped_mm in forward multiplies by experts that lie in one tensor" in str(seen)
    assert [found.macs for found in seen.operations] == [7 * (16 * 32 + 32 * 16)]
    assert seen.cost.macs == 7 * (6 * 16 + 2 * 16 * 32 + 16 * 4)
