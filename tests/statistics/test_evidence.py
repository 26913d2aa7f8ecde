"""What selectors may look at is what a hook sees, what autograd says, and what a slow twin of the network carries."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import CalibrationError, UsageError
from recoup.statistics import kept_images, maps
from recoup.statistics.rank import problem_of
from tests.oracles import flow_by_definition, records_of
from tests.zoo import ZOO, seeded

TAYLOR = recoup.Paper(selector="taylor")


def calibrated(model, batches, method=TAYLOR):
    data = recoup.split(model, batches, held_out=method.holds_out)
    return recoup.calibrate(recoup.trace(model, batches[0]), data, method)


def evidence_of(seen, name):
    return problem_of(seen, seen.structure.group(name)).evidence


def by_hand(model, images, names, loss):
    """What each module reads, and the derivative of the loss by that reading alone."""
    twin, read = copy.deepcopy(model), {}

    def keep(name):
        def hook(_, args):
            read[name] = args[0].clone().requires_grad_() if not args[0].requires_grad else args[0].clone()
            return (read[name],)

        return hook

    for name in names:
        twin.get_submodule(name).register_forward_pre_hook(keep(name))
    slopes = torch.autograd.grad(loss(twin(images)), [read[name] for name in names])
    return dict(zip(names, slopes, strict=True))


def own_answers(scores):
    return F.cross_entropy(scores, scores.argmax(1), reduction="sum")


def test_maps_are_what_a_hook_sees_of_every_reader():
    entry = ZOO["residual"]
    model, images = entry.build(5), entry.batch(20)
    seen = calibrated(model, [images])
    group = seen.structure.group("stem.0")
    assert set(group.producers) == {"stem.0", "a.1.0"} and len(group.consumers) == 3
    for name, values in zip(group.consumers, evidence_of(seen, "stem.0").maps(), strict=True):
        x, _ = records_of(model, name, images)
        torch.testing.assert_close(values, x)


def test_gradients_pass_the_reader_alone():
    """Two convolutions and a skip read the stream: the derivative by what one of them reads knows of no other."""
    entry = ZOO["residual"]
    model, images = entry.build(5), entry.batch(20)
    seen = calibrated(model, [images])
    group = seen.structure.group("stem.0")
    expected = by_hand(model, images, group.consumers, own_answers)
    for name, slope in zip(group.consumers, evidence_of(seen, "stem.0").gradients(), strict=True):
        torch.testing.assert_close(slope, expected[name])


def test_a_flattened_map_gets_its_positions_back():
    entry = ZOO["flattened"]
    model, images = entry.build(6), entry.batch(20)
    evidence = evidence_of(calibrated(model, [images]), "0")
    with torch.no_grad():
        expected = model[:3](images)
    (values,), (slopes,) = evidence.maps(), evidence.gradients()
    torch.testing.assert_close(values, expected)
    flat = by_hand(model, images, ["4"], own_answers)["4"]
    torch.testing.assert_close(slopes, flat.view_as(expected))


def test_a_linear_layer_on_several_dims_has_its_positions_behind():
    entry = ZOO["perceptron"]
    model, batch = entry.build(6), entry.batch(20)
    x, _ = records_of(model, "2", batch)
    (values,) = evidence_of(calibrated(model, [batch]), "0").maps()
    torch.testing.assert_close(values, x.movedim(-1, 1))


def test_a_layer_called_twice_shows_what_it_reads_both_times():
    entry = ZOO["shared"]
    model, images = entry.build(6), entry.batch(10)
    seen = calibrated(model, [images])
    twice = []
    x, _ = records_of(model, "again", images)  # both calls, one behind the other
    for group in seen.structure.prunable:
        evidence = group_evidence(seen, group)
        for name, values, slopes in zip(group.consumers, evidence.maps(), evidence.gradients(), strict=True):
            assert values.shape == slopes.shape and values.shape[:2] == (10, group.width)
            if name == "again":
                twice.append(values)
    torch.testing.assert_close(twice[0], torch.cat([part.flatten(2) for part in x.split(10)], dim=2))
    group = next(group for group in seen.structure.prunable if "again" in group.consumers)
    place = group.consumers.index("again")
    calls = group_evidence(seen, group).single_maps()[place : place + 2]
    for call, part in zip(calls, x.split(10), strict=True):
        torch.testing.assert_close(call.values[:, :, 0], part)


def group_evidence(seen, group):
    return problem_of(seen, group).evidence


def test_the_loss_is_that_of_the_labels_where_there_are_some():
    entry = ZOO["plain"]
    model, images = entry.build(5), entry.batch(30)
    labels = torch.arange(30) % 4
    name = "0.2.0"
    expected = by_hand(model, images, [name], lambda scores: F.cross_entropy(scores, labels, reduction="sum"))[name]
    for method in (TAYLOR, recoup.Fast(selector="taylor")):
        batches = [(images[:20], labels[:20]), (images[20:], labels[20:])]
        seen = calibrated(model, batches, method)
        (slopes,) = evidence_of(seen, "0.0.0").gradients()
        fit = torch.arange(30) if method is TAYLOR else (torch.arange(30) % 5 != 4).nonzero().squeeze(1)
        torch.testing.assert_close(slopes, expected[fit])


def test_values_have_half_their_squared_norm_for_a_loss():
    entry = ZOO["windows"]
    model, images = entry.build(4), entry.batch(10)
    seen = calibrated(model, [images], recoup.Fast(selector="taylor", outputs="values"))
    group = seen.structure.prunable[0]
    fit = (torch.arange(10) % 5 != 4).nonzero().squeeze(1)
    name = group.consumers[0]
    expected = by_hand(model, images, [name], lambda outputs: outputs.square().sum() / 2)[name][fit]
    torch.testing.assert_close(evidence_of(seen, group.name).gradients()[0], expected)


def test_labels_that_the_model_has_no_output_for_are_refused():
    entry = ZOO["plain"]
    seen = calibrated(entry.build(4), [(entry.batch(8), torch.arange(8))])
    with pytest.raises(CalibrationError, match="go from 0 to 7, but the model has 4 outputs.*leave the labels out"):
        evidence_of(seen, "0.0.0").gradients()


@pytest.mark.parametrize("name", ["residual", "plain", "flattened", "perceptron"])
def test_the_flow_is_that_of_the_slow_twin(name):
    entry = ZOO[name]
    model, batch = entry.build(5), entry.batch(10)
    if name in ("residual", "perceptron"):  # activations in forward: the twin has none
        model = without_activations(model)
    seen = calibrated(model, [batch], recoup.Paper(selector="synflow"))
    for group in seen.structure.prunable:
        twin = flow_by_definition(model, batch, list(group.consumers))
        through = importance = 0
        for consumer in seen.structure.consumers_of(group):
            a, b = twin[consumer.name]
            if isinstance(model.get_submodule(consumer.name), nn.Linear):
                a, b = a.movedim(-1, 1), b.movedim(-1, 1)
            local = consumer.inputs - group.start
            sums = [v.reshape(v.shape[1], -1).sum(1) for v in (a * b, b)]
            through = through + torch.zeros(group.width).double().index_add_(0, local, sums[0])
            importance = importance + torch.zeros(group.width).double().index_add_(0, local, sums[1])
        found = group_evidence(seen, group).flow()
        torch.testing.assert_close(found.through / found.through.sum(), through / through.sum())
        torch.testing.assert_close(found.importance / found.importance.sum(), importance / importance.sum())


def without_activations(model):
    """ReLUs do nothing to values that are positive, as those of the absolute network are; others go."""
    twin = copy.deepcopy(model)
    for place, part in enumerate(twin.children()):
        if isinstance(part, (nn.GELU, nn.Tanh)):
            twin[place] = nn.Identity()
    return twin


def test_the_flow_of_a_deep_network_does_not_overflow():
    """Forty layers, each of which multiplies by about 1e12: their product has nearly five hundred digits."""
    with seeded(0):
        layers = [nn.Linear(10, 10) for _ in range(40)]
        for each in layers:
            nn.init.uniform_(each.weight, -2e11, 2e11)
        layers[0].weight.data[3] = 0
        model = nn.Sequential(*(part for each in layers for part in (each, nn.Tanh())), nn.Linear(10, 3)).double()
    seen = calibrated(model, [torch.randn(30, 10).double()], recoup.Paper(selector="synflow"))
    flow = evidence_of(seen, "0").flow()
    assert bool(flow.through.isfinite().all()) and bool(flow.importance.isfinite().all())
    assert int(flow.through.argmin()) == 3 and float(flow.through[3]) == 0
    assert float(flow.importance.min()) > 0


def test_factors_of_batch_norms_and_folded_filters():
    entry = ZOO["residual"]
    model = entry.build(5)
    seen = calibrated(model, [entry.batch(10)])
    evidence = evidence_of(seen, "stem.0")
    convs, norms = (model.stem[0], model.a[1][0]), (model.stem[1], model.a[1][1])
    torch.testing.assert_close(evidence.scales(), torch.stack([norm.weight for norm in norms], dim=1).detach())
    expected = [
        conv.weight.flatten(1) * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None]
        for conv, norm in zip(convs, norms, strict=True)
    ]
    torch.testing.assert_close(evidence.folded(), torch.cat(expected, dim=1).detach())


def test_channels_without_a_batch_norm_have_no_factors():
    entry = ZOO["flattened"]
    evidence = evidence_of(calibrated(entry.build(6), [entry.batch(10)]), "0")
    assert evidence.scales().shape == (6, 0)


def counted(monkeypatch):
    calls, run = [], maps.call_checked

    def counting(model, inputs, number):
        calls.append(inputs.size)
        return run(model, inputs, number)

    monkeypatch.setattr(maps, "call_checked", counting)
    return calls


@pytest.mark.parametrize(
    ("selector", "passes"), [("taylor", 1), ("apoz", 1), ("hrank", 1), ("forward", 0), ("fpgm", 0)]
)
def test_one_pass_serves_all_groups(selector, passes, monkeypatch):
    entry = ZOO["residual"]
    seen = calibrated(entry.build(5), [entry.batch(20)], recoup.Paper(selector=selector))
    calls = counted(monkeypatch)
    recoup.rank(seen)
    assert calls == [20] * passes
    assert bool(seen.images) is bool(passes)


def test_images_are_as_many_as_the_maps_have_room_for(monkeypatch):
    entry = ZOO["residual"]
    seen = calibrated(entry.build(5), [entry.batch(20), entry.batch(20, seed=2)])
    calls = counted(monkeypatch)
    monkeypatch.setattr(maps, "MOST_BYTES", {"cpu": 23 * 2 * maps._bytes_per_image(seen)})
    monkeypatch.setattr(maps, "AT_ONCE", 8)
    (values, *_) = evidence_of(seen, "stem.0").maps()
    assert len(values) == 23 and calls == [8, 8, 4, 3]


def test_images_of_every_batch_are_kept(monkeypatch):
    monkeypatch.setattr(kept_images, "MOST_IMAGES", 10)
    entry = ZOO["plain"]
    batches = [entry.batch(8, seed=number) for number in range(4)]
    seen = calibrated(entry.build(4), batches)
    assert [inputs.size for inputs in seen.images] == [3, 3, 3, 1]
    for inputs, batch in zip(seen.images, batches, strict=True):
        torch.testing.assert_close(inputs.args[0], batch[: inputs.size])
    whole = calibrated(entry.build(4), [*batches])
    unknown = recoup.calibrate(whole.traced, recoup.split(entry.build(4), iter(batches), held_out=False), TAYLOR)
    assert [inputs.size for inputs in unknown.images] == [8, 2]


def test_where_no_images_were_kept_it_is_said():
    entry = ZOO["plain"]
    seen = calibrated(entry.build(4), [entry.batch(8)], recoup.Paper())
    with pytest.raises(UsageError, match=r"no calibration images were kept.*Paper\(selector='taylor'\)"):
        evidence_of(seen, "0.0.0").maps()


def test_the_model_and_the_gradient_mode_are_as_before():
    entry = ZOO["residual"]
    model, images = entry.build(5).train(), entry.batch(20)
    before = copy.deepcopy(model.state_dict())
    seen = calibrated(model, [images])
    with torch.no_grad():
        recoup.rank(seen)
        assert not torch.is_grad_enabled()
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.inference_mode():
        recoup.rank(seen)


class InPlace(nn.Module):
    """Writes into what a layer has read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        x.mul_(0).add_(1)
        return self.head(y + 0 * x)


def test_what_is_written_into_later_is_seen_as_it_was_read():
    with seeded(0):
        model, x = InPlace(), torch.randn(30, 4)
    seen = calibrated(model, [x])
    group = next(group for group in seen.structure.groups if "b" in group.consumers)
    place = group.consumers.index("b")
    with torch.no_grad():
        torch.testing.assert_close(group_evidence(seen, group).maps()[place], model.a(x))


@pytest.mark.parametrize("selector", ["taylor", "apoz"])
def test_batches_that_there_is_no_room_for_are_left_out(selector, monkeypatch):
    entry = ZOO["plain"]
    batches = [(entry.batch(8, seed=number), torch.arange(8) % 4) for number in range(3)]
    seen = calibrated(entry.build(5), batches, recoup.Paper(selector=selector))
    monkeypatch.setattr(maps, "MOST_BYTES", {"cpu": 8 * 2 * maps._bytes_per_image(seen)})
    calls = counted(monkeypatch)
    recoup.rank(seen)
    assert calls == [8]


def orders_by(model, batch, selector, weighting="none"):
    method = recoup.Paper(selector=selector, weighting=weighting)
    seen = calibrated(model.eval(), [batch], method)
    return {name: ranking.order.tolist() for name, ranking in recoup.rank(seen).items()}


@pytest.mark.parametrize("selector", ["apoz", "hrank", "taylor", "lookahead"])
def test_those_who_do_not_look_at_statistics_do_not_mind_how_rows_are_weighed(selector):
    entry = ZOO["residual"]
    model, images = entry.build(6), entry.batch(40)
    assert orders_by(model, images, selector, "outputs") == orders_by(model, images, selector)


@pytest.mark.parametrize("selector", ["thinet", "lasso"])
def test_contributions_of_layers_in_parts_are_those_under_the_mean_slope(selector):
    """The mean over outputs of the slopes weighs the rows of a whole layer, as without parts."""
    entry = ZOO["residual"]
    model, images = entry.build(6), entry.batch(40)
    assert orders_by(model, images, selector, "outputs") == orders_by(model, images, selector, "slope")


class Words(nn.Module):
    """A network of integers: what a layer reads was looked up."""

    def __init__(self, padding=None):
        super().__init__()
        self.table, self.places = nn.Embedding(20, 6, padding_idx=padding), nn.Embedding(5, 6)
        self.a, self.b, self.head = nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = self.table(x) + self.places(torch.arange(5, device=x.device))
        return self.head(self.b(self.a(x).mean(1)))


@pytest.mark.parametrize("padding", [None, 0])
def test_the_flow_of_integers_is_that_of_the_mean_absolute_row(padding):
    with seeded(0):
        model, words = Words(padding).double().eval(), torch.randint(0, 20, (10, 5))
    seen = calibrated(model, [words], recoup.Paper(selector="synflow"))
    E, A, B, H = (each.weight.detach().abs() for each in (model.table, model.a, model.b, model.head))
    read, importance = E.mean(0), (H @ B @ A).sum(0)
    group = next(group for group in seen.structure.prunable if "a" in group.consumers)
    flow = group_evidence(seen, group).flow()
    torch.testing.assert_close(flow.importance / flow.importance.sum(), importance / importance.sum())
    torch.testing.assert_close(flow.through / flow.through.sum(), read * importance / (read * importance).sum())


def test_depthwise_convolutions_and_embeddings_make_channels_too():
    entry = ZOO["depthwise"]
    model = entry.build(6)
    seen = calibrated(model, [entry.batch(10)], recoup.Paper(selector="l1"))
    filters = problem_of(seen, seen.structure.prunable[0]).filters
    expected = torch.cat([model[0][0].weight.flatten(1), model[1].weight.flatten(1)], dim=1).detach()
    torch.testing.assert_close(filters, expected)
    with seeded(0):
        model, words = Words().eval(), torch.randint(0, 20, (10, 5))
    seen = calibrated(model, [words], recoup.Paper(selector="l1"))
    group = next(group for group in seen.structure.prunable if "a" in group.consumers)
    expected = torch.cat([model.table.weight.T, model.places.weight.T], dim=1).detach()
    torch.testing.assert_close(problem_of(seen, group).filters, expected)


class Folded(nn.Module):
    """Reads the parts of every sample as if they were samples."""

    def __init__(self, *, fold):
        super().__init__()
        self.a, self.b, self.head, self.fold = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 3), fold

    def forward(self, x):
        n, parts, width = x.shape
        h = self.b(self.a(x.reshape(n * parts, width) if self.fold else x).relu()).relu()
        return self.head((h.reshape(n, parts, -1) if self.fold else h).mean(1))


@pytest.mark.parametrize("selector", ["taylor", "apoz", "hrank"])
def test_parts_of_a_sample_in_the_first_dim_are_found(selector):
    found = []
    for fold in (True, False):
        with seeded(3):
            model, x = Folded(fold=fold).eval(), torch.randn(20, 7, 6)
        seen = calibrated(model, [x], recoup.Paper(selector=selector))
        (values,), (slopes,) = evidence_of(seen, "a").maps(), evidence_of(seen, "a").gradients()
        found.append((values, slopes, recoup.rank(seen)))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    if selector != "hrank":  # a part is a map of its own, and a map of all parts is one
        for name, ranking in found[0][2].items():
            assert torch.equal(ranking.order, found[1][2][name].order)


class TimeFirst(nn.Module):
    """Has the samples in the second dim."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.b(self.a(x.transpose(0, 1)).relu()).relu().mean(0))


def test_samples_that_do_not_come_first_are_refused_by_the_layers_name():
    with seeded(0):
        model, x = TimeFirst().eval(), torch.randn(20, 7, 6)
    seen = calibrated(model, [x])
    with pytest.raises(UsageError, match=r"^a: b reads \(7, 20, 8\) for 20 images.*first dim.*such as 'backward'"):
        recoup.rank(seen)


class Doubled(nn.Module):
    """A convolution, or a linear layer behind a flattened map, that reads two channels twice."""

    def __init__(self, *, flat):
        super().__init__()
        self.a, self.flat = nn.Conv2d(3, 4, 1), flat
        self.b = nn.Linear(6 * 12, 3) if flat else nn.Conv2d(6, 3, 1)

    def forward(self, x):
        h = self.a(x).relu()
        h = torch.cat([h, h[:, :2]], dim=1)
        return self.b(h.flatten(1)) if self.flat else self.b(h).mean((2, 3))


@pytest.mark.parametrize("flat", [True, False])
def test_a_channel_that_is_read_twice_has_two_maps_and_others_one(flat):
    with seeded(1):
        model, x = Doubled(flat=flat).eval(), torch.randn(10, 3, 4, 3)
    seen = calibrated(model, [x], recoup.Paper(selector="apoz", weighting="none"))
    (found,) = evidence_of(seen, "a").single_maps()
    assert found.is_read.tolist() == [[True, True], [True, True], [True, False], [True, False]]
    with torch.no_grad():
        expected = model.a(x).relu()
    torch.testing.assert_close(found.values[:, :, 0], expected)
    torch.testing.assert_close(found.values[:, :2, 1], expected[:, :2])
    active = (expected != 0).double().mean((0, 2, 3))
    assert recoup.rank(seen)["a"].order.tolist() == active.argsort(descending=True, stable=True).tolist()
