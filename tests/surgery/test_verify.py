"""Nothing hides from the proof: masks beside scores, whole numbers, what is no tensor, other batch sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import VerificationError
from recoup.surgery import verify as verifying
from recoup.surgery.comparison import compare, populations

HALF = recoup.Budget(width=0.5)
FLOOR = torch.finfo(torch.float32).min


def scores(count=40):
    return torch.randn(count, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def masked_by(value, share):
    values = scores()
    values[:, : int(10 * share)] = value
    return values


@pytest.mark.parametrize("value", [-1e9, FLOOR, 1e30, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_mask_beside_the_scores_hides_nothing(value, share):
    expected = masked_by(value, share)
    wrong = expected.clone()
    wrong[3, 9] += 1e-6
    assert compare([expected], [expected]).difference == 0
    with pytest.raises(VerificationError, match="differs from the masked original"):
        compare([expected], [wrong])


def test_populations_are_decades_apart():
    sizes = torch.cat([scores().flatten().abs(), torch.full((50,), 1e9, dtype=torch.float64), torch.zeros(7)])
    population, scales = populations(sizes)
    assert population[:400].eq(0).all() and population[400:450].eq(1).all() and population[450:].eq(0).all()
    assert 0.3 < float(scales[0]) < 1.2 and 0.5e9 < float(scales[1]) < 2e9


def test_a_stray_value_is_no_population():
    population, scales = populations(torch.tensor([1e-12, 1.0, 2.0, 3.0, 4.0, 5.0]))
    assert len(scales) == 1 and not population.any()


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ([scores(), torch.tensor([1, 2])], [scores(), torch.tensor([1, 3])]),
        ([scores(), torch.tensor([True])], [scores(), torch.tensor([False])]),
        ([scores(), None], [scores(), torch.ones(1)]),
        ([scores(), 3], [scores(), 4]),
        ([scores().to(torch.complex128)], [scores() + 1e-6j]),
        ([torch.tensor([1.0, -torch.inf])], [torch.tensor([1.0, torch.inf])]),
        ([torch.tensor([1.0, torch.nan])], [torch.tensor([1.0, 2.0])]),
        ([scores(), torch.zeros(5)], [scores(), torch.full((5,), 1e-3)]),
    ],
)
def test_whatever_is_returned_is_compared(expected, actual):
    assert compare(expected, expected).difference == 0
    with pytest.raises(VerificationError):
        compare(expected, actual)


@pytest.mark.parametrize(
    "expected", [[torch.tensor([1, 2])], [], [None], [torch.zeros(0)], [torch.full((3,), -torch.inf)]]
)
def test_where_nothing_is_compared_nothing_is_proven(expected):
    with pytest.raises(VerificationError, match="nothing to compare"):
        compare(expected, expected)


def test_rounding_is_allowed_for_and_noise_is_not_compared():
    expected = torch.cat([scores(), 1e-17 * scores()])
    actual = torch.cat([scores() * (1 + 1e-9), 1e-17 * scores().flip(0)])
    shaken = torch.cat([scores() * (1 + 1e-10), 1e-17 * scores().roll(1, 0)])
    with pytest.raises(VerificationError):
        compare([expected], [actual])
    assert compare([expected], [actual], [shaken]).allowed == pytest.approx(1e-8, rel=0.1)
    with pytest.raises(VerificationError, match="nothing to compare"):  # all of it is noise
        compare([expected[40:]], [actual[40:]], [shaken[40:]])
    with pytest.raises(VerificationError, match="differs"):  # rounding excuses no wrong channel
        compare([expected], [torch.cat([scores() + 0.1, actual[40:]])], [shaken])


def test_a_choice_that_rounding_changes_may_differ():
    compare([scores(), torch.tensor([1, 2])], [scores(), torch.tensor([1, 3])], [scores(), torch.tensor([1, 5])])


class Rolled(nn.Module):
    """A roll along channels, which the class cannot hold at another size, though it runs."""

    def __init__(self, end, quiet=False):
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)
        self.end, self.quiet, self.raw = end, quiet, False

    def forward(self, x):
        h = F.relu(self.a(x)).roll(5, 1)
        if self.quiet:
            with torch.no_grad():
                h = h * h.mean((1, 2, 3), keepdim=True).sigmoid()
        y = self.fc(F.relu(self.b(h)).mean((2, 3)))
        return y if self.raw else self.end(y)


ENDS = {
    "a mask": lambda y: y.masked_fill(torch.arange(10) > 7, -1e9),
    "the smallest number": lambda y: y.masked_fill(torch.arange(10) > 2, FLOOR),
    "also a choice": lambda y: (y * 1e-20, y.argmax(1), None),
    "complex": lambda y: torch.complex(y, y * 2),
}


@pytest.mark.parametrize("keep_class", [True, False])
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_code_that_moves_channels_is_seen_through_what_is_returned(end, quiet, keep_class):
    torch.manual_seed(0)
    model = Rolled(ENDS[end], quiet).eval()
    with torch.no_grad():  # exact copies: half of the width loses nothing, if it is cut right
        for layer in (model.a, model.b):
            layer.weight[8:], layer.bias[8:] = layer.weight[:8].clone(), layer.bias[:8].clone()
    images = torch.randn(128, 3, 12, 12)
    result = recoup.prune(model, [images], budget=HALF, keep_class=keep_class, method=recoup.Paper(classifier=True))
    assert result.plan.keep["b"].sum() == 8
    if type(result.model) is Rolled:
        model.raw = result.model.raw = True
    with torch.no_grad():
        found, expected = (out[0] if isinstance(out, tuple) else out for out in (result.model(images), model(images)))
    spread = (expected - expected.mean(0)).abs().flatten().median()
    assert float((found - expected).abs().median() / spread) < 1e-2


def test_a_model_that_returns_choices_only_is_refused_before_the_work():
    model = Rolled(lambda y: y.argmax(1)).eval()
    with pytest.raises(VerificationError, match="return its scores"):
        recoup.prune(model, [torch.randn(64, 3, 12, 12)], budget=HALF, progress=lambda *_: pytest.fail("work was done"))


def test_it_is_compared_on_real_samples_and_at_several_batch_sizes(monkeypatch):
    """A model that errs on real images only, or for three samples only, is found out."""
    seen = []
    compare_all = verifying._compare_all
    monkeypatch.setattr(
        verifying, "_compare_all", lambda make, batches, name: seen.append(batches) or compare_all(make, batches, name)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    images = torch.randn(64, 3, 8, 8)
    recoup.prune(model, [images], budget=HALF, method=recoup.Paper(classifier=True))
    (batches,) = seen
    assert [batch.size for batch in batches] == [2, 3, 1]
    assert torch.equal(batches[1].args[0], images[:3])


def test_a_model_with_a_state_of_its_own_is_compared_from_the_same_state():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
            self.register_buffer("mean", torch.zeros(8, 1, 1))

        def forward(self, x):
            h = F.relu(self.a(x))
            self.mean.mul_(0.9).add_(h.mean((0, 2, 3)).detach()[:, None, None], alpha=0.1)
            return self.b(h - self.mean)

    torch.manual_seed(0)
    model = Counting().eval()
    result = recoup.prune(model, [torch.randn(64, 3, 8, 8)], budget=HALF, method=recoup.Paper(classifier=True))
    assert result.model.mean.shape == (4, 1, 1) and not result.model.mean.any() and not model.mean.any()
