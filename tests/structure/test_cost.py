import pytest
import torch
from torch import nn

from recoup.prune import trace
from recoup.recover import compensate
from recoup.settings import Settings
from recoup.structure.cost import cost
from recoup.structure.surgery import apply
from tests.test_laws import calibrated, draw_keep
from tests.zoo import ZOO


def count_by_hooks(model, batch):
    """MACs of one sample, counted from the shapes of the layers that run."""
    total = 0

    def note(module, args, out):
        nonlocal total
        if isinstance(module, nn.modules.conv._ConvNd):
            total += out.numel() // len(args[0]) * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            total += out.numel() // len(args[0]) * module.in_features

    handles = [module.register_forward_hook(note) for module in model.modules()]
    with torch.no_grad():
        model(*batch) if isinstance(batch, tuple) else model(batch)
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("name", ZOO)
def test_predicted_cost_is_that_of_the_sliced_model(name):
    model, seen = calibrated(name, 5, Settings())
    batch = ZOO[name].batch(2)
    whole = cost(seen.structure, model)
    assert whole.macs == count_by_hooks(model, batch)
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    keep = draw_keep(seen.structure, 3)
    plan = compensate(seen, keep)
    smaller, added = apply(model, plan), [name for name in plan.weights if name not in seen.structure.shapes]
    predicted = cost(seen.structure, model, keep)
    assert predicted.macs == count_by_hooks(smaller, batch)
    extra = sum(smaller.get_parameter(name).numel() for name in added)
    assert predicted.parameters == sum(p.numel() for p in smaller.parameters()) - extra


def test_macs_of_a_known_network():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    assert cost(trace(model, torch.randn(1, 3, 8, 8)).structure, model).macs == 64 * 9 * 3 * 8 + 16 * 9 * 8 * 4
