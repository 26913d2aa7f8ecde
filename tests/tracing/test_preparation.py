"""The copy that is worked on: hooks, states, weights in two roles, computed weights, heads for training."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

import recoup
from recoup.errors import InputError, RecoupError
from recoup.graph.standalone import Standalone

HALF, WHOLE = recoup.Budget(width=0.5), recoup.Budget(width=1.0)
METHODS = (recoup.Paper(classifier=True), recoup.Released(classifier=True), "fast", "best")


def plain():
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(16, 10)).eval()


def images(count=128):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def error(model, smaller, x):
    with torch.no_grad():
        return float((model(x) - smaller(x)).norm() / model(x).norm())


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_that_changes_results_is_a_part_of_the_model(method):
    model = plain()
    model[0].register_forward_hook(lambda _, __, out: out * 2)
    with pytest.warns(recoup.RecoupWarning, match="the hooks of 0 change what the model returns"):
        result = recoup.prune(model, [images()], budget=WHOLE, method=method)
    assert error(model, result.model, images(8)) < 1e-4
    assert recoup.apply(model, result.plan)[0]._forward_hooks


def test_a_hook_that_only_looks_does_not_come_along():
    model, seen = plain(), []
    model[2].register_forward_hook(lambda _, __, out: seen.append(out.mean()))
    result = recoup.prune(model, [images()], budget=HALF, method="paper")
    assert not any(module._forward_hooks for module in result.model.modules())
    assert len(model[2]._forward_hooks) == 1 and len(seen) <= 1


class Stateful(nn.Module):
    """Keeps a mean of what it sees, in eval mode too, and takes it off."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 10)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = F.relu(self.a(x))
        self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        self.calls.add_(1)
        return self.fc(F.relu(self.b(x - self.mean.view(1, -1, 1, 1))).mean((2, 3)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("goal", [{"budget": HALF}, {"tolerance": 5.0}])
def test_the_callers_buffers_do_not_move(method, goal):
    torch.manual_seed(0)
    model = Stateful().eval()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        labels = copy.deepcopy(model)(images()).argmax(1)
    if "tolerance" in goal:
        goal = {**goal, "validation": [(images(), labels)]}
    with pytest.warns(recoup.RecoupWarning) if method in ("best", "fast") else torch.no_grad():
        result = recoup.prune(model, [images()], method=method, **goal)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not result.model.mean.any() and not result.model.calls


class Language(nn.Module):
    """The head's weight is the table of the embedding."""

    def __init__(self, functional=False):
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(50, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.functional = functional
        if not functional:
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.down(F.relu(self.up(x)))
        return F.linear(x, self.words.weight) if self.functional else self.head(x)


def language(**options):
    torch.manual_seed(0)
    model = Language(**options).eval()
    for tensor, dim in ((model.words.weight, 1), (model.down.weight, 0), (model.down.bias, 0)):
        tensor.data.copy_(torch.cat([tensor.data.narrow(dim, 0, 8)] * 2, dim))
    return model, [torch.randint(50, (32, 12)) for _ in range(8)]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_shares_the_table_of_an_embedding_gets_a_weight_of_its_own(method, tmp_path):
    model, batches = language()
    result = recoup.prune(model, batches, budget=HALF, method=method, exclude=["up"])
    assert result.model.words.embedding_dim == 8 and result.model.head.in_features == 8
    assert error(model, result.model, batches[0]) < 1e-3
    assert model.head.weight is model.words.weight
    assert result.report.before.parameters == sum(p.numel() for p in model.parameters())
    assert error(recoup.apply(model, result.plan), result.model, batches[0]) == 0
    loaded = recoup.load(result.save(tmp_path / "out"), Language)
    assert error(loaded, result.model, batches[0]) == 0
    assert loaded.head.weight is not loaded.words.weight


@pytest.mark.parametrize("method", METHODS)
def test_so_does_a_function_that_multiplies_by_it(method):
    """The class has no place for a second weight, so the result is a standalone graph."""
    model, batches = language(functional=True)
    result = recoup.prune(model, batches, budget=HALF, method=method, exclude=["up"])
    assert isinstance(result.model, Standalone) and result.model.words.weight.shape == (50, 8)
    assert error(model, result.model, batches[0]) < 1e-3


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("how", [{"budget": recoup.Budget(parameters=0.7)}, {"budget": HALF, "keep_class": True}])
def test_a_table_that_must_stay_shared_stays_as_it_is(functional, how):
    """A second weight would be against a budget of parameters; a class may have no place for one."""
    model, batches = language(functional=functional)
    result = recoup.prune(model, batches, method=recoup.Paper(classifier=True), **how)
    is_cut = "keep_class" in how and not functional
    assert result.model.words.weight.shape == (50, 8 if is_cut else 16)
    assert result.model.up.weight.shape[0] < 64


def weight_normed(layer):
    return torch.nn.utils.weight_norm(layer)


def masked(layer):
    return torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("change", [weight_normed, masked])
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_torch_computes_before_a_call_are_copied(change, method):
    model = plain()
    change(model[0]), change(model[2])
    model(images(2))  # leaves weights with a history behind
    result = recoup.prune(model, [images()], budget=WHOLE, method=method)
    assert error(model, result.model, images(8)) < 1e-4
    assert isinstance(result.model, Standalone)


class Helped(nn.Module):
    """A head that is used in training only."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc, self.aux = (
            nn.Conv2d(3, 16, 3),
            nn.Conv2d(16, 8, 3),
            nn.Linear(8, 5),
            nn.Conv2d(16, 5, 3),
        )

    def forward(self, x):
        h = F.relu(self.a(x))
        y = self.fc(F.relu(self.b(h)).mean((2, 3)))
        return (y, self.aux(h).mean((2, 3))) if self.training else y


@pytest.mark.parametrize("method", METHODS)
def test_a_head_for_training_refuses_to_run(method, tmp_path):
    torch.manual_seed(0)
    model = Helped().eval()
    result = recoup.prune(model, [images()], budget=HALF, method=method)
    for smaller in (result.model, copy.deepcopy(result.model), recoup.load(result.save(tmp_path / "out"), Helped)):
        with pytest.raises(InputError, match="aux does not run in eval mode.*exclude="):
            smaller.train()(images(2))
        smaller.eval()(images(2))
    kept = recoup.prune(model, [images()], budget=HALF, method=method, exclude=["a"])
    assert kept.model.a.out_channels == 16


def test_nothing_is_refused_where_nothing_was_cut():
    torch.manual_seed(0)
    result = recoup.prune(Helped().eval(), [images()], budget=WHOLE, method="paper")
    result.model.train()(images(2))


def test_a_model_that_cannot_be_copied_is_refused():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("one of a kind")

    with pytest.raises(RecoupError, match="cannot be copied .TypeError: one of a kind"):
        recoup.prune(nn.Sequential(Stubborn(8, 8), nn.Linear(8, 4)), [torch.randn(64, 8)], budget=HALF)
