"""The graph of one sample comes from a capture of several: code that treats a single one otherwise is no obstacle."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import CaptureError, InputError
from recoup.surgery.comparison import compare


class Network(nn.Module):
    """Two convolutions, and what a test puts between them."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x, shift=None):
        y = self.between(F.relu(self.a(x)))
        return self.b(y) if shift is None else self.b(y) + shift


class Cached(nn.Module):
    """Keeps a map of positions for the sizes it saw last, as detectors do."""

    sizes = None

    def forward(self, y):
        if self.sizes != y.shape:
            self.sizes, self.places = y.shape, torch.arange(y.shape[2] * y.shape[3]).view(y.shape[2:]) / 10
        return y * self.places


class Lowered(nn.Module):
    """Regions that torch.export keeps as graphs of their own, one within the other."""

    def forward(self, y):
        with torch.autocast("cpu", enabled=False):
            y = y.float() * 2
            with torch.enable_grad():
                y = y.softmax(3)
        return y + 1


class Stepped(nn.Module):
    """A number among the inputs, which the code writes into a tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x, t):
        return self.b(F.relu(self.a(x)) * torch.tensor([t], dtype=x.dtype))


def images(count=40):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def normed(y):
    """The same for one sample as for several, by other operations."""
    return y - y.mean((2, 3), keepdim=True) if len(y) > 1 else (y[0] - y[0].mean((1, 2), keepdim=True))[None]


def build(between):
    torch.manual_seed(0)
    return Network(between).eval()


@pytest.mark.parametrize("between", [normed, Cached(), Lowered()], ids=["single", "cached", "regions"])
@pytest.mark.parametrize("seen", [0, 1, 2])
def test_the_graph_serves_every_number_of_samples(between, seen):
    model = build(between)
    if seen:
        model(images(seen))
    host = recoup.trace(model, images()).standalone.host
    is_cached = seen == 2 and isinstance(between, Cached)
    for count in (1, 3, 7) if is_cached else (1, 2, 3, 7):  # for what it has cached, its code goes another way
        with torch.no_grad():
            torch.testing.assert_close(host(images(count)), model(images(count)))


def test_labels_and_costs_are_those_of_one_sample():
    traced = recoup.trace(build(nn.Identity()), images())
    shapes = [node.meta["val"].shape for node in traced.standalone.captured.graph.nodes if node.op == "call_function"]
    assert {shape[0] for shape in shapes} == {1}
    assert [p.positions for p in traced.structure.products] == [64, 64]


def test_no_method_falls_back_where_a_single_sample_goes_another_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error", recoup.RecoupWarning)
        result = recoup.prune(build(normed), [images(120)], budget=recoup.Budget(width=0.5), method="fast")
    assert result.report.method["name"] == "Fast"
    assert result.model.a.out_channels == 8


def squeezed(y):
    return y.squeeze(0) if len(y) == 1 else y.transpose(1, 2).transpose(1, 2)


def test_a_single_sample_that_is_treated_otherwise_is_refused():
    model = build(squeezed)
    host = recoup.trace(model, images()).standalone.host
    with torch.no_grad():
        torch.testing.assert_close(host(images(2)), model(images(2)))
    with pytest.raises(InputError, match=r"x.shape\[0\] >= 2 only"):
        host(images(1))


def test_a_batch_of_one_such_sample_is_captured_as_it_is():
    traced = recoup.trace(build(squeezed), images(1))
    assert traced.standalone.batch.count == 1
    with pytest.raises(CaptureError, match="one batch size only"):
        traced.standalone.host  # noqa: B018  # made here
    assert recoup.trace(build(normed), images(1)).standalone.batch.count == 2


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (4, 1, 1)])
def test_what_holds_no_samples_is_not_repeated(shape):
    model = build(nn.Identity())
    batch = {"x": images(), "shift": torch.randn(shape)}
    result = recoup.prune(model, [batch], budget=recoup.Budget(width=1.0), method="paper", keep_class=False)
    host = recoup.trace(model, batch).standalone.host
    with torch.no_grad():
        compare([model(**batch)], [host(**batch)])
        compare([model(**batch)], [result.model(**batch)])


def test_a_number_that_the_code_writes_into_the_graph_is_asked_of_every_call():
    torch.manual_seed(0)
    model = Stepped().eval()
    host = recoup.trace(model, {"x": images(), "t": 3}).standalone.host
    with torch.no_grad():
        torch.testing.assert_close(host(x=images(5), t=3), model(images(5), 3))
    with pytest.raises(InputError, match="t == 3 only"):
        host(x=images(5), t=4)
