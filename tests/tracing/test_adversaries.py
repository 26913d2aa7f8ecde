"""Networks that once slipped through: each pruned right, or locked with a reason."""

import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import CalibrationError, LockedError, UsageError, VerificationError
from recoup.graph.standalone import Standalone

HALF = recoup.Budget(width=0.5)


def images(samples=60):
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


def conv(inputs, outputs, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class Body(nn.Module):
    """Two convolutions and a classifier around a function of the model and the first one's output."""

    def __init__(self, body, width=8, after=None, **layers):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a = body, conv(3, width)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.head = nn.Linear(after or width, 4)

    def forward(self, x):
        return self.head(self.body(self, torch.tanh(self.a(x))).mean((2, 3)))


def pruned(model, batch=None):
    return recoup.prune(model.double().eval(), [images() if batch is None else batch], budget=HALF)


def calibrated(model, batch, method):
    return recoup.calibrate(recoup.trace(model, batch), recoup.split(model, [batch], held_out=False), method)


def reasons_of(model, batch=None):
    seen = recoup.inspect(model.double().eval(), images(2) if batch is None else batch)
    return {group.row.name: group.row.reasons for group in seen.groups}


@pytest.mark.parametrize("width", [6, 8, 12, 24])
@pytest.mark.parametrize(
    "body",
    [
        lambda m, h: m.p(h[:, : m.half]) + m.q(h[:, -m.half :]),
        lambda m, h: m.r(F.channel_shuffle(h, 2)),
    ],
)
def test_code_that_counts_channels_is_found_before_the_work(body, width):
    half = width // 2
    model = Body(body, width, after=4, p=conv(half, 4), q=conv(half, 4), r=conv(width, 4))
    model.half = half
    result = pruned(model)
    assert result.report.proof.difference < 1e-10
    assert isinstance(result.model, Standalone)
    assert result.report.macs_removed >= 0.5
    held = recoup.inspect(model, images(2), keep_class=True)
    assert "cutting it breaks the model's own code" in held.groups[0].row.reasons[0]


@pytest.mark.parametrize(
    "body",
    [
        lambda m, h: m.c(h * m.scale),
        lambda m, h: m.c(h * torch.arange(1.0, 9.0, dtype=h.dtype).view(1, -1, 1, 1)),
    ],
)
def test_constants_along_the_channels_lock_them(body):
    model = Body(body, c=conv(8, 8))
    model.scale = torch.rand(1, 8, 1, 1).double()
    assert "meets a tensor of fixed size" in reasons_of(model)["a"][0] or "not understood" in reasons_of(model)["a"][0]
    assert pruned(model).model.c.out_channels == 4


def test_a_bare_parameter_can_produce_channels():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 3)), nn.Linear(8, 4)

        def forward(self, x):
            return self.b(torch.tanh(F.linear(x, self.w)))

    result = recoup.prune(Bare(), [torch.randn(60, 3)], budget=HALF)
    assert result.model.w.shape == (4, 3)
    assert result.model.b.in_features == 4


def test_one_batch_norm_under_two_names():
    norm = nn.BatchNorm2d(8)
    model = Body(lambda m, h: m.two(m.c(m.one(h))), c=conv(8, 8), one=norm, two=norm)
    smaller = pruned(model).model
    assert smaller.one is smaller.two
    assert smaller.one.num_features == 4


@pytest.mark.parametrize("length", [5, 8])
def test_a_batch_norm_over_positions_is_not_part_of_g(length):
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(length), nn.Flatten(1), nn.Linear(8 * length, 3)
    )
    result = recoup.prune(model.double().eval(), [torch.randn(60, length, 6).double()], budget=HALF)
    traced = recoup.trace(model, torch.randn(2, length, 6).double())
    assert traced.activations["2"].nodes == ()
    assert result.model[0].out_features == 4


def test_a_functional_call_that_ignores_the_layers_bias_is_refitted_without_one():
    model = Body(lambda m, h: F.conv2d(h, m.c.weight, padding=1), c=conv(8, 8, bias=False))
    result = pruned(model)
    assert result.model.c.bias is None
    assert result.model.c.in_channels == 4


def test_layers_that_share_a_weight_are_both_given_the_mean():
    layers = {"p": nn.Linear(8, 8), "q": nn.Linear(8, 8), "head": nn.Linear(8, 4), "a": nn.Linear(3, 8)}
    layers["q"].weight = layers["p"].weight

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict(layers)

        def forward(self, x):
            x = torch.tanh(self.layers["a"](x))
            return torch.cat([self.layers["head"](self.layers["p"](x)), self.layers["head"](self.layers["q"](x))], 1)

    model, x = Tied().double(), torch.randn(100, 3).double()
    seen = calibrated(model, x, recoup.Paper(weighting="none"))
    smaller = recoup.apply(model, recoup.recover(seen, {"layers.a": torch.arange(8) < 4}).plan)
    with torch.no_grad():
        torch.testing.assert_close(smaller(x).mean(0), model(x).mean(0), rtol=1e-9, atol=1e-9)


def test_a_convolution_without_a_batch():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(3, 6), conv(6, 4)

        def forward(self, x):
            return torch.stack([self.b(torch.tanh(self.a(image))).mean((1, 2)) for image in x])

    smaller = recoup.prune(Loop().double(), [images(4)[:2]] * 3, budget=HALF).model
    assert smaller.a.out_channels == 3


def test_a_form_of_a_call_that_no_rule_expects_is_locked_by_name():
    model = Body(lambda m, h: m.c(h) * h.var(unbiased=False), c=conv(8, 8))
    assert any("var in forward" in reason for reason in reasons_of(model)["a"])


def test_inputs_that_must_be_positive():
    model = Body(lambda m, h: m.c(h), c=conv(8, 8))
    wrapped = nn.Sequential(Log(), model)
    result = recoup.prune(wrapped.double(), [images().abs() + 0.1], budget=HALF)
    assert result.model[1].a.out_channels == 4


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def test_a_model_that_is_never_the_same_twice_is_told_so():
    model = Body(lambda m, h: m.c(F.dropout(h, 0.5)), c=conv(8, 8))
    with pytest.raises(VerificationError, match="gives other outputs for the same inputs even in eval mode"):
        pruned(model)


def test_tensors_in_lists_are_inputs_too():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

        def forward(self, xs):
            return self.b(torch.tanh(self.a(xs[0]) + self.a(xs[1])))

    batch = {"xs": [torch.randn(32, 3), torch.randn(32, 3)]}
    result = recoup.prune(Lists(), [batch], budget=HALF)
    assert result.report.samples == 32
    assert result.report.before.macs == 2 * 24 + 32


@pytest.mark.parametrize("labels", [torch.eye(4), torch.rand(4), torch.arange(3)])
def test_labels_that_are_no_class_numbers(labels):
    with pytest.raises(CalibrationError, match="labels must be 4 class numbers"):
        recoup.accuracy(nn.Linear(3, 4), [(torch.randn(4, 3), labels)])


def test_labels_in_a_column_are_class_numbers():
    model, x = nn.Linear(3, 4), torch.randn(6, 3)
    right = model(x).argmax(1)
    assert recoup.accuracy(model, [(x, right[:, None])]) == 100.0


def test_a_search_without_anything_to_visit_is_told_so():
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(40, 3)
    with pytest.raises(LockedError, match=r"nothing to prune.*Paper\(classifier=True\)"):
        recoup.prune(model, [x], validation=[(x, torch.arange(40) % 4)], tolerance=50.0, method="paper")


def test_returned_features_do_not_spare_the_blocks_before_them():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b, self.head = conv(3, 8), conv(8, 8), conv(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            x = x + self.b(torch.tanh(self.a(x)))
            return self.head(x.mean((2, 3))), x

    model = Features().double()
    result = recoup.prune(model, [images()], validation=[(images(), torch.arange(60) % 4)], tolerance=90.0)
    assert result.model.a.out_channels < 8


def test_a_candidate_that_cannot_be_measured_is_named():
    def measure(model):
        if model[0].out_features < 8:
            raise RuntimeError("shapes do not fit")
        return 1.0

    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(VerificationError, match="a candidate could not be measured .shapes do not fit"):
        recoup.prune(model, [torch.randn(40, 3)], evaluate=measure, tolerance=1.0, method=recoup.Paper(classifier=True))


def test_too_few_samples_are_said_and_counted():
    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 4))
    with pytest.warns(
        recoup.RecoupWarning, match=r"1 of 1 refitted layers saw fewer samples than they have inputs \(2: 20 for 32,"
    ):
        result = recoup.prune(model, [torch.randn(20, 3)], budget=HALF, method=recoup.Paper(classifier=True))
    assert "warning: " in str(result.report)
    assert result.report.to_json()["warnings"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of which ours are one kind
        recoup.prune(model, [torch.randn(100, 3)], budget=HALF)


def test_positions_of_tokens_are_sampled_and_chunked(monkeypatch):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(), torch.randn(4, 100, 6).double()
    seen = calibrated(model, x, recoup.Paper(positions=10))
    assert seen.statistics["2"].moments.rows == 40
    whole = calibrated(model, x, recoup.Paper(positions=None))
    monkeypatch.setattr(importlib.import_module("recoup.algebra.patches"), "CHUNK_VALUES", 1)
    parts = calibrated(model, x, recoup.Paper(positions=None))
    torch.testing.assert_close(whole.statistics["2"].moments.scatter, parts.statistics["2"].moments.scatter)


@pytest.mark.parametrize("mask", [torch.ones(5, dtype=torch.bool), torch.ones(8), [True] * 8])
def test_masks_of_the_wrong_form(mask):
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(40, 3)
    seen = calibrated(model, x, recoup.Paper())
    with pytest.raises(UsageError, match="0: what to keep must be a bool tensor of 8 channels"):
        recoup.recover(seen, {"0": mask})
    with pytest.raises(UsageError, match="the mask over all channels: what to keep must be a bool tensor of 12"):
        recoup.recover(seen, torch.ones(3, dtype=torch.bool))


class Parts(nn.Module):
    """The second half of a layer's outputs passes through `middle`, and the last layer cares little about it."""

    def __init__(self, middle, bias=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.middle, self.first, self.last = middle, conv(3, 8), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.first.bias[4:] += bias
            self.last.weight[:, 4:] *= 1e-3

    def forward(self, x):
        left, right = torch.relu(self.first(x)).split(4, 1)
        return self.last(torch.cat([left, self.middle(right)], 1)).mean((2, 3))


@pytest.mark.parametrize("method", ["best", "fast", recoup.Paper(classifier=True)], ids=["best", "fast", "paper"])
@pytest.mark.parametrize("bias", [0.0, -100.0], ids=["weak", "dead"])
@pytest.mark.parametrize(
    "middle",
    [
        lambda h: F.avg_pool2d(h, 3, 1, 1),
        lambda h: F.max_pool2d(h, 3, 1, 1),
        lambda h: F.interpolate(h, scale_factor=1.0, mode="bilinear"),
        lambda h: h.view(h.shape[0], 2, 2, 8, 8).transpose(1, 2).reshape(h.shape),
    ],
    ids=["mean", "max", "resized", "shuffled"],
)
def test_a_part_that_no_parameter_belongs_to_keeps_a_channel(middle, bias, method):
    model = Parts(middle, bias).double().eval()
    result = recoup.prune(model, [images()], budget=HALF, method=method)
    kept = result.plan.keep["first"]
    assert kept[:4].any() and int(kept[4:].sum()) == 1
