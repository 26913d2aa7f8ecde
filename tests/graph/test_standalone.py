"""Standalone results: saved, loaded, exported, trained, for any batch, and refused where one graph would not do."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ArtefactError, CaptureError, InputError
from recoup.graph.standalone import Standalone
from tests.zoo import ZOO

HALF = recoup.Budget(macs=0.5)


class Shuffled(nn.Module):
    """A channel shuffle, which forces a standalone result, and then what a test puts there."""

    def __init__(self, then=lambda y, x: y):
        super().__init__()
        self.then = then
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = F.relu(self.b(F.relu(self.a(x))))
        y = y.view(len(y), 4, 4, 8, 8).transpose(1, 2).reshape(y.shape)
        return self.then(self.c(y), x)


def images(count=40):
    return torch.randn(count, 3, 8, 8)


def pruned(then=lambda y, x: y, **options):
    torch.manual_seed(0)
    model = Shuffled(then).eval()
    return model, recoup.prune(model, [images()], budget=HALF, **options, keep_class=False)


def test_it_serves_any_batch_and_says_why_it_is_one():
    _, result = pruned()
    assert isinstance(result.model, Standalone)
    assert "its code moves channels" in result.report.form
    assert [result.model(images(count)).shape for count in (1, 3, 8)] == [(n, 4, 8, 8) for n in (1, 3, 8)]


@pytest.mark.parametrize(
    "then",
    [lambda y, x: y, lambda y, x: {"y": y, "parts": (y.mean(1), [y])}, lambda y, x: y.flatten(1).unflatten(1, (4, -1))],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_saved_and_loaded_bit_by_bit(tmp_path, then, frozen):
    torch.manual_seed(0)
    model = Shuffled(then).eval().requires_grad_(not frozen)
    result = recoup.prune(model, [images()], budget=HALF, keep_class=False)
    loaded = recoup.load(result.save(tmp_path / "smaller"))
    x = images(5)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), result.model(x), rtol=0, atol=0)
    assert (loaded.training, {p.requires_grad for p in loaded.parameters()}) == (False, {not frozen})
    assert loaded.state_dict().keys() == result.model.state_dict().keys()


def test_it_copies_exports_trains_and_is_pruned_again():
    _, result = pruned()
    x = images(6)
    for twin in (copy.deepcopy(result.model), pickle.loads(pickle.dumps(result.model))):
        assert torch.equal(twin(x), result.model(x))
    torch.testing.assert_close(torch.export.export(twin, (x,)).module()(x), result.model(x))
    twin(x).square().mean().backward()
    assert all(p.grad is not None for p in twin.parameters())
    again = recoup.prune(twin, [images()], budget=HALF, keep_class=False)
    assert again.report.after.macs <= 0.5 * result.report.after.macs


@pytest.mark.parametrize(
    "then",
    [
        lambda y, x: y * float(x.shape[0]),
        lambda y, x: torch.cat([y[i : i + 1] for i in range(x.shape[0])]),
    ],
)
def test_numbers_that_do_not_follow_the_batch_leave_the_class_as_it_is(then):
    model = Shuffled(then).eval()
    with pytest.raises(CaptureError, match="one batch size only. Prune with keep_class=True"):
        recoup.trace(model, images(1)).host  # noqa: B018  # made here
    with pytest.warns(recoup.RecoupWarning, match="only what the model's own class holds is pruned"):
        result = recoup.prune(model, [images()], budget=recoup.Budget(width=0.5), keep_class=False)
    assert type(result.model) is Shuffled
    assert result.model.a.out_channels == 8
    for budget in (recoup.Budget(parameters=0.8), recoup.Budget(macs=0.8)):
        with pytest.warns(recoup.RecoupWarning, match="only what the model's own class holds is pruned|paper's method"):
            assert type(recoup.prune(model, [images()], budget=budget).model) is Shuffled


def test_a_way_for_a_few_samples_only_is_left_for_that_of_many():
    model = Shuffled(lambda y, x: y * (2.0 if x.shape[0] > 2 else 1.0)).eval()
    with pytest.raises(CaptureError, match="one batch size only"):
        recoup.trace(model, images(1)).host  # noqa: B018  # made here
    result = recoup.prune(model, [images()], budget=HALF, keep_class=False)
    x = images(9)
    assert result.report.proof.difference < 1e-10
    with pytest.raises(InputError, match=r"x.shape\[0\] >= 3 only"):
        result.model(x[:2])
    assert result.model(x).shape == (9, 4, 8, 8)


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h[:, :4].zero_(),
        lambda h: h[:, :4].relu_(),
        lambda h: h.view(len(h), 4, 4, 8, 8)[:, 1].mul_(2.0),
        lambda h: h[:, ::2].copy_(h[:, 1::2].clone()),
    ],
)
def test_what_is_written_into_through_a_view_may_go_and_is_right(write):
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.s = nn.Conv2d(3, 16, 3, padding=1), Shuffled()
            self.s.a = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x):
            h = self.a(x)
            write(h)
            return self.s(h)

    result = recoup.prune(Writer().eval(), [images()], budget=recoup.Budget(width=0.5), keep_class=False)
    assert result.report.groups[0].locked == 0
    assert result.report.macs_removed > 0.3


@pytest.mark.parametrize(
    "move",
    [
        lambda m, h: h[:, m.order],
        lambda m, h: h.index_select(1, m.order),
        lambda m, h: h[:, [3, 1, 2, 0, *range(4, 16)]],
        lambda m, h: h.roll(3, 1),
        lambda m, h: h.flip(1),
        lambda m, h: h * F.softplus(m.beta)[:, None, None],
        lambda m, h: h - h.mean((0, 2, 3))[:, None, None],
    ],
)
def test_channels_moved_by_stored_numbers_are_followed(move):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.beta = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1), nn.Parameter(torch.rand(16))
            self.register_buffer("order", torch.randperm(16, generator=torch.Generator().manual_seed(3)))

        def forward(self, x):
            return self.b(F.relu(move(self, self.a(x))))

    for seed in range(3):
        torch.manual_seed(seed)
        result = recoup.prune(Moved().eval(), [images()], budget=recoup.Budget(width=0.5), keep_class=False)
        assert result.report.groups[0].after == 8
        assert result.report.proof.difference < 1e-10


def test_a_class_result_needs_its_model_to_load(tmp_path):
    entry = ZOO["plain"]
    result = recoup.prune(entry.build(6), [entry.batch()], budget=HALF)
    with pytest.raises(ArtefactError, match="Pass the original model to `load`"):
        recoup.load(result.save(tmp_path / "own"))


def test_a_damaged_graph_is_refused(tmp_path):
    _, result = pruned()
    folder = result.save(tmp_path / "smaller")
    (folder / "graph.json").write_text("{}")
    with pytest.raises(ArtefactError, match="graph.json is damaged"):
        recoup.load(folder)
    with pytest.raises(ArtefactError, match="graph.json is not a graph"):
        recoup.load(folder, check=False)


@pytest.mark.parametrize(("multiple", "share"), [(8, 0.3), (8, 0.45), (4, 0.6), ("device", 0.3)])
def test_widths_are_multiples_where_layers_overlap(multiple, share):
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.a2, self.b = nn.Conv2d(3, 32, 3), nn.Conv2d(3, 32, 3), nn.Conv2d(3, 64, 3)
            self.d = nn.Conv2d(64, 4, 1)

        def forward(self, x):
            return self.d(F.relu(torch.cat([self.a(x), self.a2(x)], 1) + self.b(x)))

    torch.manual_seed(0)
    method = recoup.Paper(multiple_of=multiple, classifier=True)
    result = recoup.prune(Overlapping(), [images()], budget=recoup.Budget(width=share), method=method, keep_class=False)
    widths = [result.model.a.out_channels, result.model.a2.out_channels, result.model.b.out_channels]
    assert all(width % (16 if multiple == "device" else multiple) == 0 for width in widths)
    assert widths[2] < 64
