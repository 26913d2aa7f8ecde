"""Channels that are exact combinations of others: without a ridge they leave the kept set, and nothing is lost."""

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import IllConditionedError

EXACT = recoup.Paper(ridge=0.0, positions=None, weighting="none", classifier=True)


def combined(layer, copies, mixtures):
    """Outputs of a linear map: some copied, some mixed of others, before anything bends them."""
    with torch.no_grad():
        for target, source in copies.items():
            layer.weight[target], layer.bias[target] = layer.weight[source], layer.bias[source]
        for target, (a, b) in mixtures.items():
            layer.weight[target] = layer.weight[a] - 2 * layer.weight[b]
            layer.bias[target] = layer.bias[a] + 1


def single(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh() if kind == "copies" else nn.Identity(), nn.Linear(8, 5))
    model = model.double().eval()
    combined(model[0], {5: 1, 6: 1}, {} if kind == "copies" else {2: (0, 1), 7: (3, 4)})
    return model, torch.randn(200, 12).double(), 6 if kind == "copies" else 4


class Coupled(nn.Module):
    """A stream that two layers read: one of them all of it, the other through an activation of its own."""

    def __init__(self):
        super().__init__()
        self.stem, self.side = nn.Linear(12, 8), nn.Linear(8, 4)
        self.inner, self.back, self.head = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + 0.1 * self.back(torch.tanh(self.inner(x)))), self.side(torch.relu(x))


@pytest.mark.parametrize("kind", ["copies", "mixtures"])
@pytest.mark.parametrize("share", [1.0, 0.9])
def test_no_more_than_can_be_chosen_is_kept_whatever_the_share(kind, share):
    model, x, most = single(kind)
    result = recoup.prune(model, [x], budget=recoup.Budget(width=share), method=EXACT)
    assert result.model[0].out_features == most
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x), rtol=1e-8, atol=1e-8)
    assert (result.report.dependent["0"].found, result.report.dependent["0"].gone) == (8 - most, 8 - most)
    assert f"{8 - most} channels were exact combinations of others, {8 - most} of them are gone" in str(result.report)
    assert result.report.to_json()["dependent"] == {"0": {"found": 8 - most, "gone": 8 - most}}


def test_with_a_ridge_all_of_them_stay():
    model, x, _ = single("copies")
    method = recoup.Paper(positions=None, weighting="none", classifier=True)
    result = recoup.prune(model, [x], budget=recoup.Budget(width=1.0), method=method)
    assert result.model[0].out_features == 8
    assert not result.report.dependent and result.report.dependence is None


@pytest.mark.parametrize("selector", ["forward", "l2", "random"])
@pytest.mark.parametrize("kind", ["copies", "mixtures"])
def test_a_width_by_hand_that_asks_for_more_is_kept_and_no_error(kind, selector):
    model, x, _ = single(kind)
    method = recoup.Paper(ridge=0.0, positions=None, weighting="none", selector=selector)
    result = recoup.prune(model, [x], widths={"0": 7}, method=method)
    assert result.model[0].out_features == 7
    if selector == "forward":
        with torch.no_grad():
            torch.testing.assert_close(result.model(x), model(x), rtol=1e-8, atol=1e-8)


def test_readers_of_one_stream_leave_out_what_each_of_them_cannot_tell_apart():
    """Through the activation every channel differs; for the other reader two of them are combinations."""
    torch.manual_seed(0)
    model, x = Coupled().double().eval(), torch.randn(300, 12).double()
    combined(model.stem, {}, {2: (0, 1), 7: (3, 4)})
    combined(model.back, {}, {2: (0, 1), 7: (3, 4)})
    seen = recoup.calibrate(recoup.trace(model, x), recoup.split(model, [x], held_out=False), EXACT)
    keep = torch.ones(8, dtype=torch.bool)
    keep[3] = False  # 7 and 4 tell what it was
    smaller = recoup.apply(model, recoup.recover(seen, {"stem": keep}).plan)
    with torch.no_grad():
        (wanted, _), (got, _) = model(x), smaller(x)
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-7)
    assert bool((smaller.head.weight == 0).all(dim=0).any())  # channel 2, which the others tell


def test_a_coupled_group_of_copies_is_cut_to_what_can_be_chosen():
    torch.manual_seed(0)
    model, x = Coupled().double().eval(), torch.randn(300, 12).double()
    for layer in (model.stem, model.back):
        combined(layer, {5: 1, 6: 2}, {})
    result = recoup.prune(model, [x], budget=recoup.Budget(width=1.0), method=EXACT)
    assert result.model.stem.out_features == 6
    with torch.no_grad():
        for got, wanted in zip(result.model(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("model", "x", "named"),
    [
        (nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)), torch.randn(20, 20), "2: 20 samples"),
        (
            nn.Sequential(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)),
            torch.randn(100, 3, 8, 8),
            "3: 100 samples tell nothing of 128 inputs",
        ),
    ],
    ids=["linear", "flattened"],
)
def test_too_few_samples_are_no_dependence(model, x, named):
    """With fewer samples than inputs everything can be interpolated, and nothing of that holds on new ones."""
    with pytest.raises(IllConditionedError, match=f"{named}.*Calibrate on more images or positions, or give a `ridge`"):
        recoup.prune(model.eval(), [x], budget=recoup.Budget(width=1.0), method=EXACT)


def test_what_is_nearly_a_copy_stays():
    """A share of 1e-6 of its variance is its own: no rounding of float32, and no combination of others."""
    model, x, _ = single("copies")
    with torch.no_grad():
        model[0].weight[5] += 1e-3 * torch.randn(12).double()
        model[0].weight[6] += 1e-3 * torch.randn(12).double()
    result = recoup.prune(model, [x], budget=recoup.Budget(width=1.0), method=EXACT)
    assert result.model[0].out_features == 8 and not result.report.dependent
