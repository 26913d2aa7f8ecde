import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.channels.cost import cost
from recoup.surgery.apply import apply
from tests.test_laws import calibrated, draw_keep
from tests.zoo import ZOO


def count(model, batch):
    """MACs of one sample in convolutions and products by a matrix, counted by torch while the model runs."""
    counter = FlopCounterMode(display=False)
    inputs = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad(), counter:
        model(*inputs)
    flops = counter.get_flop_counts()["Global"]
    return (
        sum(n for op, n in flops.items() if "bmm" not in str(op) and "attention" not in str(op)) // 2 // len(inputs[0])
    )


@pytest.mark.parametrize("name", ZOO)
def test_predicted_cost_is_that_of_the_sliced_model(name):
    model, seen = calibrated(name, 5, recoup.Paper())
    batch = ZOO[name].batch(2)
    whole = cost(seen.structure, model)
    assert whole.macs == count(model, batch)
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    keep = draw_keep(seen.structure, 3)
    plan = recoup.recover(seen, keep).plan
    smaller = apply(model, plan)
    own = {name for name, _ in model.named_parameters()}
    added = [name for name in plan.weights if name not in own]
    predicted = cost(seen.structure, model, keep)
    assert predicted.macs == count(smaller, batch)
    extra = sum(smaller.get_parameter(name).numel() for name in added)
    assert predicted.parameters == sum(p.numel() for p in smaller.parameters()) - extra


def test_macs_of_a_known_network():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    assert cost(recoup.trace(model, torch.randn(1, 3, 8, 8)).structure, model).macs == 64 * 9 * 3 * 8 + 16 * 9 * 8 * 4
