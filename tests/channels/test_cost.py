import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.channels.cost import Cost, cost
from recoup.cli.models import resnet20, vgg16_bn
from recoup.surgery.apply import apply
from tests.test_laws import calibrated, draw_keep
from tests.zoo import ZOO

ACTIVATIONS = (
    "relu", "sigmoid", "tanh", "hardtanh", "hardsigmoid", "hardswish", "elu", "celu", "gelu", "silu", "leaky_relu",
    "softplus", "mish", "_prelu_kernel", "threshold",
)  # fmt: skip


class ElementwiseCounter(TorchDispatchMode):
    """Adds up 2 per element that a batch norm makes and 1 per element that an activation makes, while a model runs."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "batch_norm" in name:
            self.operations += 2 * made[0].numel()
        elif name.removesuffix("_") in ACTIVATIONS or name in ACTIVATIONS:
            self.operations += made.numel()
        return made


def count_elementwise(model, batch):
    """Operations of batch norms and activations on one sample, counted while the model runs."""
    inputs = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad(), ElementwiseCounter() as counter:
        model(*inputs)
    return counter.operations / len(inputs[0])


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
    assert whole.elementwise == count_elementwise(model, batch) > 0
    assert whole.parameters == sum(p.numel() for p in model.parameters())
    keep = draw_keep(seen.structure, 3)
    plan = recoup.recover(seen, keep).plan
    smaller = apply(model, plan)
    own = {name for name, _ in model.named_parameters()}
    added = [name for name in plan.weights if name not in own]
    predicted = cost(seen.structure, model, keep)
    assert predicted.macs == count(smaller, batch)
    assert predicted.elementwise == count_elementwise(smaller, batch)
    extra = sum(smaller.get_parameter(name).numel() for name in added)
    assert predicted.parameters == sum(p.numel() for p in smaller.parameters()) - extra


def test_macs_of_a_known_network():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    assert cost(recoup.trace(model, torch.randn(1, 3, 8, 8)).structure, model).macs == 64 * 9 * 3 * 8 + 16 * 9 * 8 * 4


def test_flops_of_a_known_network_whole_and_cut():
    """2 per element of a batch norm, 1 per element of an activation; other norms, pools and sums are not counted."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(1, 8)),
        *(nn.Conv2d(8, 4, 3, padding=1), nn.SiLU(inplace=True), nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)),
    ).eval()
    structure = recoup.trace(model, torch.randn(1, 3, 8, 8)).structure
    assert cost(structure, model).elementwise == 64 * 8 * (2 + 1) + 16 * 4 + 2 * 10
    keep = structure.keep_all()
    keep[structure.groups[0].channels][:3] = False
    keep[structure.groups[1].channels][:1] = False
    left = cost(structure, model, keep)
    macs = 64 * 27 * 5 + 16 * 45 * 3 + 48 * 10
    assert (left.macs, left.flops) == (macs, macs + 64 * 5 * 3 + 16 * 3 + 20)


def test_a_call_that_is_made_twice_counts_twice_and_what_is_no_channel_counts():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

        def forward(self, x):
            return self.b(self.norm(torch.relu(self.norm(torch.relu(self.a(torch.tanh(x)))))))

    model = Twice().eval()
    structure = recoup.trace(model, torch.randn(2, 6)).structure
    assert cost(structure, model).elementwise == 6 + 2 * 5 * (1 + 2)


def test_vgg16_on_cifar_has_the_flops_of_its_plan():
    """Thirteen convolutions of 3 x 3, each with batch norm and activation, five halvings, one linear layer."""
    plan, side, before, macs, others = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M", 32, 3, 0, 0
    for entry in plan.split():
        if entry == "M":
            side //= 2
            continue
        macs, others, before = macs + side**2 * 9 * before * int(entry), others + 3 * side**2 * int(entry), int(entry)
    model = vgg16_bn().eval()
    parameters = sum(p.numel() for p in model.parameters())
    found = recoup.inspect(model, torch.randn(1, 3, 32, 32)).cost
    assert found == Cost(macs + 512 * 10, parameters, others)
    assert (found.macs, found.flops) == (313_201_664, 313_201_664 + 3 * 276_480)


@pytest.mark.parametrize("keep_class", [False, True])
def test_flops_do_not_depend_on_the_form_of_the_result(keep_class):
    model, x = resnet20().eval(), torch.randn(2, 3, 32, 32)
    structure = recoup.trace(model, x, keep_class=keep_class).structure
    assert cost(structure, model).elementwise == count_elementwise(model, x)


def test_a_cost_is_plain_data_with_its_sum():
    assert Cost(7, 3, 5).flops == 12
    assert Cost(7, 3, 5).to_json() == {"macs": 7, "parameters": 3, "elementwise": 5, "flops": 12}
