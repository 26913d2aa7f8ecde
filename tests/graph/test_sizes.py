"""Standalone results follow the sizes of their inputs, or refuse a call that they cannot serve."""

import math
import re

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import InputError
from recoup.graph import capture
from recoup.graph.expressions import NoExpressionError, evaluate, multiplied, shown, tree_of
from recoup.graph.standalone import Standalone

EVERYWHERE = recoup.Paper(classifier=True)

SIZE = ("size", "x", 0)
WHOLE, HALF = recoup.Budget(width=1.0), recoup.Budget(width=0.5)


class Pixels(nn.Module):
    """Channels that are rolled, which forces a standalone result, and then what a test puts there."""

    def __init__(self, then):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 6, 1)
        self.then = then

    def forward(self, x):
        y = F.relu(self.b(F.relu(self.a(x)).roll(5, 1)))
        return self.then(self.c(y), x)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(40, 16))
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 7)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.words(tokens) + self.places[:length]
        x = x + self.down(F.relu(self.up(x).roll(5, 2)))
        mask = torch.ones(length, length).tril()
        return self.head(mask @ x / mask.sum(1, keepdim=True))


def normed(y, _):
    batch, channels, height, width = y.shape
    rows = y.view(batch * channels, height * width)
    return ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-5)).view(y.shape)


def padded(y, _):
    height, width = y.shape[-2:]
    return F.pad(y, (0, -width % 8, 0, -height % 8))


def cropped(y, _):
    top = (y.shape[2] - y.shape[2] // 2) // 2
    return y[:, :, top : top + y.shape[2] // 2]


FOLLOWED = {
    "mean by hand": lambda y, x: y.sum((2, 3)) / (x.shape[2] * x.shape[3]),
    "resized to the input": lambda y, x: F.interpolate(F.max_pool2d(y, 2), size=x.shape[-2:]),
    "instance norm": normed,
    "padded to a multiple": padded,
    "cropped": cropped,
    "scaled by a root": lambda y, x: y * x.shape[2] ** -0.5,
    "positions": lambda y, x: y.mean(3) + torch.arange(x.shape[2]),
    "len": lambda y, x: y.flatten(2).reshape(len(x), 6, -1).mean(2),
    "number of samples": lambda y, x: (y / x.shape[0] ** 2, x.shape[0]),
    "cut to what it is": lambda y, x: y[:, :, : x.shape[2], : x.shape[3]].contiguous(),
    "stretched": lambda y, x: F.interpolate(y, scale_factor=1.5),
}


def pruned(then, size=12, budget=HALF, method=EVERYWHERE):
    torch.manual_seed(0)
    model = Pixels(then).eval()
    result = recoup.prune(model, [torch.randn(40, 3, size, size)], budget=budget, method=method, keep_class=False)
    assert isinstance(result.model, Standalone)
    return model, result


@pytest.mark.parametrize("name", FOLLOWED)
def test_sizes_follow_the_input(name):
    model, result = pruned(FOLLOWED[name], budget=WHOLE)
    for shape in ((1, 3, 12, 12), (5, 3, 12, 12), (3, 3, 20, 16), (2, 3, 9, 31)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(result.model(x), model(x), rtol=1e-4, atol=1e-5)


class Padded(nn.Module):
    """Pads to a multiple and back, a few times over: a rounding within a rounding, and a module before each."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.ReLU() for _ in range(4))

    def forward(self, y, _):
        for step in self.steps:
            y = F.max_pool2d(step(padded(y, None)), 3, 2, 1)
        return y


@pytest.mark.parametrize("most", ["MOST_OPERATIONS", "MOST_CONDITIONS"])
def test_sizes_that_take_too_much_reasoning_are_fixed(monkeypatch, most):
    monkeypatch.setattr(capture, most, 12)
    model, result = pruned(Padded(), budget=WHOLE)
    assert "serves calls with x.shape[1] == 3, x.shape[2] == 12, x.shape[3] == 12 only" in result.report.form
    x = torch.randn(5, 3, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"x.shape\[2\] == 12 only"):
        result.model(torch.randn(5, 3, 20, 12))


@pytest.mark.parametrize("name", ["instance norm", "len", "mean by hand"])
def test_sizes_that_channels_determine_too_follow_both(name):
    """Cut to half: numbers such as batch times channels are of the smaller network."""
    _, result = pruned(FOLLOWED[name])
    assert result.model.b.weight.shape[0] == 8
    with torch.no_grad():
        both = result.model(torch.cat([x := torch.randn(2, 3, 20, 16), torch.randn(3, 3, 20, 16)]))
        torch.testing.assert_close(both[:2], result.model(x), rtol=1e-4, atol=1e-5)


def test_tokens_of_any_length_up_to_the_table():
    torch.manual_seed(0)
    model = Tokens().eval()
    result = recoup.prune(model, [torch.randint(50, (40, 12))], budget=WHOLE, method="paper", keep_class=False)
    assert isinstance(result.model, Standalone)
    for length in (2, 12, 31, 40):
        tokens = torch.randint(50, (3, length))
        with torch.no_grad():
            torch.testing.assert_close(result.model(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"tokens.shape\[1\] <= 40 only"):
        result.model(torch.randint(50, (3, 41)))


@pytest.mark.parametrize("side", [4, 12])
def test_a_size_that_torch_itself_takes_for_fixed_is_asked_for(side):
    """How torch works out what a grid reads fixes a size; what comes after is written with that number."""

    def sampled(y, _):
        y = F.conv_transpose2d(F.avg_pool2d(y, 2), torch.ones(6, 6, 2, 2), stride=2)
        theta = 0.9 * torch.eye(2, 3).expand(len(y), 2, 3)
        y = F.grid_sample(y, F.affine_grid(theta, list(y.shape), align_corners=False), align_corners=False)
        batch, channels, height, width = y.shape
        parts = y.reshape(batch, channels, height // 2, 2, width // 2, 2)
        return parts.permute(0, 2, 4, 3, 5, 1).reshape(batch, height * width // 4, 4 * channels).mean(1)

    model = Pixels(sampled).eval()
    seen = torch.randn(32, 3, 8, 8)
    result = recoup.prune(model, [seen], budget=WHOLE, method=EVERYWHERE, keep_class=False)
    torch.testing.assert_close(result.model(seen), model(seen), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=re.escape("== 8 only")):
        result.model(torch.randn(3, 3, side, side))


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda y, x: y * (2.0 if x.shape[0] > 50 else 3.0), r"x.shape\[0\] <= 50"),
        (lambda y, x: y if x.shape[2] == x.shape[3] else -y, r"x.shape\[3\] == x.shape\[2\]"),
        (lambda y, x: y if x.shape[2] % 4 == 0 else -y, r"\(x.shape\[2\] % 4\) == 0"),
        (lambda y, x: y * float(x.shape[2]), r"x.shape\[2\] == 12"),
        (lambda y, x: torch.stack([y[:, :, i].mean(2) for i in range(x.shape[2] // 4)]), r"x.shape\[2\] // 4"),
        (lambda y, x: y if x.shape[2] > 1 else -y, r"x.shape\[2\] >= 2"),
    ],
)
def test_what_cannot_follow_is_refused_when_it_is_called(then, message):
    model, result = pruned(then, budget=WHOLE)
    refused = []
    for shape in ((2, 3, 12, 12), (51, 3, 12, 12), (2, 3, 20, 16), (2, 3, 18, 18), (2, 3, 4, 12), (2, 3, 1, 12)):
        x = torch.randn(shape)
        try:
            with torch.no_grad():
                found = result.model(x)
        except InputError as error:
            refused.append(str(error))
        else:
            with torch.no_grad():
                torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    assert any(re.search(message, told) for told in refused), refused


def test_a_first_batch_that_takes_another_way_leaves_the_class_as_it_is():
    torch.manual_seed(0)
    model = Pixels(lambda y, x: y * (2.0 if x.shape[0] > 8 else 3.0)).eval()
    with pytest.warns(recoup.RecoupWarning, match="own class holds is pruned.*shape.0. <= 8"):
        result = recoup.prune(model, [torch.randn(40, 3, 12, 12)], budget=HALF, method=EVERYWHERE, keep_class=False)
    assert type(result.model) is Pixels


def test_the_report_says_which_sizes_are_fixed():
    _, result = pruned(lambda y, x: y * float(x.shape[2]))
    assert "x.shape[2] == 12" in str(result.report)


class Timed(nn.Module):
    """A number among the inputs, of which the code makes a tensor."""

    def __init__(self, number=lambda t: t):
        super().__init__()
        self.a, self.e, self.b, self.number = nn.Linear(8, 16), nn.Linear(1, 16), nn.Linear(16, 4), number

    def forward(self, x, t, wide=True):
        h = self.a(x).view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)
        h = F.relu(h + self.e(torch.full((1, 1), self.number(t)).to(x.dtype)))
        return self.b(h if wide else h * 2)


def test_whole_numbers_among_the_inputs_are_inputs_of_the_graph():
    torch.manual_seed(0)
    model = Timed().eval()
    model.e.weight.data *= 0.05
    batches = [{"x": torch.randn(64, 8), "t": t} for t in (3, 6, 9)]
    for method in (EVERYWHERE, "fast"):
        result = recoup.prune(model, batches, budget=WHOLE, method=method, keep_class=False)
        assert isinstance(result.model, Standalone)
        x = torch.randn(5, 8)
        with torch.no_grad():
            for t in (3, 9, 50):
                torch.testing.assert_close(result.model(x=x, t=t), model(x, t), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [EVERYWHERE, "best"], ids=["paper", "best"])
def test_numbers_that_are_written_into_the_graph_must_not_differ(method):
    torch.manual_seed(0)
    model = Timed(float).eval()
    with pytest.raises(recoup.RecoupError, match="t == 3"):
        recoup.prune(
            model, [{"x": torch.randn(64, 8), "t": t} for t in (3, 6)], budget=HALF, method=method, keep_class=False
        )
    result = recoup.prune(model, [{"x": torch.randn(64, 8), "t": 3}] * 2, budget=HALF, method=method, keep_class=False)
    result.model(x=torch.randn(5, 8), t=3)
    with pytest.raises(InputError, match="t == 3 only.*t is 9"):
        result.model(x=torch.randn(5, 8), t=9)


def test_flags_among_the_inputs_are_checked():
    torch.manual_seed(0)
    model = Timed().eval()
    result = recoup.prune(
        model, [{"x": torch.randn(64, 8), "t": 3, "wide": True}] * 2, budget=HALF, method=EVERYWHERE, keep_class=False
    )
    with pytest.raises(InputError, match="wide == True only"):
        result.model(x=torch.randn(5, 8), t=3, wide=False)
    with pytest.raises(InputError, match=r"takes exactly \(x, t, wide\)"):
        result.model(torch.randn(5, 8), 3)


def test_trees_are_evaluated_and_shown():
    tree = ("le", ("floordiv", ("add", ("size", "x", 2), 1), 2), ("mul", 3, ("input", "t")))
    assert shown(tree) == "((x.shape[2] + 1) // 2) <= (3 * t)"
    assert evaluate(tree, lambda leaf: 12 if leaf[0] == "size" else 2)
    assert not evaluate(tree, lambda leaf: 12 if leaf[0] == "size" else 1)


@pytest.mark.parametrize(
    ("tree", "before", "after", "expected"),
    [
        (("mul", 16, SIZE), 16, 9, ("mul", 9, SIZE)),
        (SIZE, 1, 9, ("mul", 9, SIZE)),
        (("mul", ("mul", 4, SIZE), ("size", "x", 2)), 48, 36, ("mul", ("mul", 3, SIZE), ("size", "x", 2))),
        (("add", SIZE, 16), 17, 10, None),
    ],
)
def test_a_factor_of_channels_changes_with_them(tree, before, after, expected):
    assert multiplied(tree, before, after) == expected


def test_an_unknown_function_is_no_tree():
    with pytest.raises(NoExpressionError):
        tree_of(sympy.sin(sympy.Symbol("s")), {sympy.Symbol("s"): ("size", "x", 0)})
    assert math.isclose(tree_of(sympy.Float(0.5), {}), 0.5)
