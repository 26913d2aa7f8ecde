import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import CalibrationError
from recoup.graph.standalone import Standalone
from recoup.inputs.batches import Inputs
from recoup.judge.output_error import Reference, golden_section, output_error
from recoup.surgery.apply import masked
from tests.recovery.bench import Written
from tests.test_laws import draw_keep
from tests.zoo import ZOO, seeded


@functools.cache
def calibrated(name):
    entry = ZOO[name]
    model = entry.build(6)
    traced = recoup.trace(model, entry.batch(2))
    data = recoup.split(model, [entry.batch(40)], held_out=False)
    return model, recoup.calibrate(traced, data, recoup.Paper())


def inputs_of(name, sizes=(20, 7)):
    batches = [ZOO[name].batch(size, seed=7 + size) for size in sizes]
    return [Inputs(batch if isinstance(batch, tuple) else (batch,), {}) for batch in batches]


def pruned(seen, seed=5):
    return recoup.recover(seen, draw_keep(seen.structure, seed)).plan


@pytest.mark.parametrize("name", ZOO)
def test_the_same_network_has_no_output_error(name):
    model, seen = calibrated(name)
    reference = Reference(seen.traced.standalone.host, inputs_of(name))
    assert reference.error({}) == 0.0
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert reference.error(tensors) == 0.0


@pytest.mark.parametrize("name", ["plain", "residual", "zero-pad", "concat", "gates", "one-dim"])
def test_the_output_error_of_class_scores_is_the_divergence(name):
    model, seen = calibrated(name)
    plan, batches = pruned(seen), inputs_of(name)
    error = Reference(seen.traced.standalone.host, batches).error(plan.weights)
    assert error > 0
    assert error == pytest.approx(recoup.divergence(masked(model, plan), model, batches), rel=1e-9)
    assert error == pytest.approx(recoup.divergence(recoup.apply(model, plan), model, batches), rel=1e-6)


@pytest.mark.parametrize("name", ZOO)
def test_several_networks_err_as_each_of_them_does(name):
    _, seen = calibrated(name)
    reference, groups = Reference(seen.traced.standalone.host, inputs_of(name)), seen.structure.prunable
    changes = [pruned(seen).weights, {}]
    for group in groups:
        keep = seen.structure.keep_all()
        keep[group.start : group.start + group.width // 2] = False
        changes.append(
            recoup.recover(seen, seen.structure.refill(keep, torch.arange(seen.structure.width))).plan.weights
        )
    shares = []
    errors = reference.errors(changes, shares.append)
    assert errors == pytest.approx([reference.error(change) for change in changes], rel=1e-9, abs=1e-15)
    assert errors[1] == 0.0
    assert shares == [0.5, 1.0]


def test_what_comes_before_a_change_runs_once(monkeypatch):
    with seeded(0):
        model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(5, 5), nn.Tanh()))).eval()
        batch = torch.randn(8, 5)
    host = recoup.trace(model, batch, keep_class=False).standalone.host
    reference, ran = Reference(host, [Inputs((batch,), {})]), []
    steps = [replace(step, target=noting(step.target, ran)) for step in host._program.steps]
    monkeypatch.setattr(host, "_program", replace(host._program, steps=tuple(steps)))
    reference.errors([{"6.weight": torch.zeros(5, 5)}, {"2.weight": torch.zeros(5, 5)}, {"6.bias": torch.ones(5)}])
    assert ran.count("linear") == 3 + 3 + 1 + 1  # in front of the last, from the second on, the last twice


def noting(target, ran):
    def run(*args, **kwargs):
        ran.append(target._overloadpacket.__name__)
        return target(*args, **kwargs)

    return run


def test_a_graph_that_writes_into_its_values_runs_as_a_whole(monkeypatch):
    model = Written().eval()
    with seeded(0):
        batch = torch.randn(12, 3, 6, 6)
    traced = recoup.trace(model, batch)
    reference = Reference(traced.standalone.host, [Inputs((batch,), {})])
    assert not traced.standalone.host.is_pure
    monkeypatch.setattr(Standalone, "run_each", None)  # is not asked for parts of runs
    changes = [{"a.weight": torch.zeros_like(model.a.weight)}, {"head.weight": torch.zeros_like(model.head.weight)}]
    assert reference.errors(changes) == [reference.error(change) for change in changes]


@pytest.mark.parametrize(("images", "step"), [(9, 3), (13, 2), (14, 1), (100, 1), (1, 27)])
@pytest.mark.parametrize("sizes", [(20, 7), (27,), (1,) * 27, (2,) * 13 + (1,)])
def test_a_part_of_the_images_is_taken_evenly(images, step, sizes):
    _, seen = calibrated("plain")
    weights, every = pruned(seen).weights, torch.cat([batch.args[0] for batch in inputs_of("plain")])
    host = seen.traced.standalone.host
    part = Reference(host, [Inputs((some,), {}) for some in every.split(sizes)]).part(images)
    assert sum(batch.size for batch in part._batches) == len(every[::step]) >= min(images, 27)
    expected = Reference(host, [Inputs((every[::step],), {})]).error(weights)
    assert part.error(weights) == pytest.approx(expected, rel=1e-5)


def test_the_output_error_of_other_outputs_is_relative_to_their_variance():
    """Two outputs, of four and of two dims: the mean over them, weighted by samples over batches."""
    model, seen = calibrated("several")
    plan, batches = pruned(seen), inputs_of("several")
    twin, total = masked(model, plan), 0.0
    with torch.no_grad():
        for batch in batches:
            errors = []
            for expected, actual in zip(batch.call(model).values(), batch.call(twin).values(), strict=True):
                variance = expected.var(dim=0, correction=0).mean()
                errors.append(float((expected - actual).square().mean() / variance))
            total += sum(errors) / 2 * batch.size
    error = Reference(seen.traced.standalone.host, batches).error(plan.weights)
    assert error > 0
    assert error == pytest.approx(total / 27, rel=1e-9)


def test_known_answers():
    scores = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    other = torch.tensor([[0.0, 0.0], [0.0, torch.log(torch.tensor(3.0))]])
    half_of = 0.5 * (torch.tensor(0.5 / 0.25).log() + torch.tensor(0.5 / 0.75).log())
    torch.testing.assert_close(output_error([scores], [other]), half_of.double() / 2, rtol=1e-6, atol=1e-7)
    values = torch.tensor([[1.0], [3.0]])  # variance 1
    torch.testing.assert_close(output_error([values], [values + 0.5]), torch.tensor(0.25).double(), rtol=1e-6, atol=0.0)


def test_what_the_outputs_are_may_be_said():
    torch.manual_seed(0)
    a, b = torch.randn(9, 4), torch.randn(9, 4)
    relative = (a - b).square().mean() / a.var(dim=0, correction=0).mean()
    torch.testing.assert_close(output_error([a], [b], "values"), relative.double(), rtol=1e-5, atol=1e-6)
    assert output_error([a], [b], "auto") == output_error([a], [b], "classes")
    several = output_error([a, a], [b, a], "classes")  # the first output is that of the classes
    assert several == output_error([a], [b])
    torch.testing.assert_close(output_error([a, a], [b, a], "auto"), relative.double() / 2, rtol=1e-5, atol=1e-6)


def test_a_single_score_is_a_value():
    torch.manual_seed(0)
    a, b = torch.randn(9, 1), torch.randn(9, 1)
    for kind in ("auto", "classes"):
        assert float(output_error([a], [b], kind)) > 0


def test_a_shift_of_all_scores_is_no_output_error_of_classes():
    torch.manual_seed(0)
    a = torch.randn(9, 4)
    torch.testing.assert_close(output_error([a], [a + 3]), torch.tensor(0.0).double(), rtol=0.0, atol=1e-6)
    assert float(output_error([a], [a + 3], "values")) > 1


def test_the_scale_of_values_does_not_matter():
    torch.manual_seed(0)
    a, b = torch.randn(9, 4, 3), torch.randn(9, 4, 3)
    small, large = (output_error([scale * a], [scale * b]) for scale in (1e-3, 1e3))
    torch.testing.assert_close(small, large, rtol=1e-4, atol=0.0)


def test_tensors_the_network_does_not_have_change_nothing():
    _, seen = calibrated("plain")
    assert Reference(seen.traced.standalone.host, inputs_of("plain")).error({"nobody": torch.ones(3)}) == 0.0


def test_the_host_is_as_before():
    _, seen = calibrated("plain")
    host = seen.traced.standalone.host
    before = {name: value.clone() for name, value in host.state_dict().items()}
    reference = Reference(host, inputs_of("plain"))
    first = reference.error(pruned(seen).weights)
    assert reference.error(pruned(seen).weights) == first
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())


def test_outputs_without_numbers_are_not_compared():
    class Ranks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            scores = self.b(torch.tanh(self.a(x)))
            return scores, scores.argmax(1)

    with seeded(0):
        model, x = Ranks().double().eval(), torch.randn(20, 4).double()
    host = recoup.trace(model, x).standalone.host
    reference = Reference(host, [Inputs((x,), {})])
    assert reference.error({}) == 0.0
    changed = {"b.weight": 2 * model.b.weight.detach()}
    with torch.no_grad():
        expected = output_error([model(x)[0]], [torch.func.functional_call(model, changed, (x,))[0]])
    assert reference.error(changed) == pytest.approx(float(expected))


def test_a_batch_that_makes_the_network_fail_is_named():
    _, seen = calibrated("plain")
    batches = [*inputs_of("plain"), Inputs((torch.randn(4, 5, 8, 8).double(),), {})]
    with pytest.raises(CalibrationError, match=r"calibration batch 7: .*shape\[1\] == 3 only"):
        Reference(seen.traced.standalone.host, batches, numbers=["1", "2", "7"])


def reference_of(model, images, outputs="auto"):
    return Reference(recoup.trace(model, images).standalone.host, [Inputs((images,), {})], outputs)


@pytest.mark.parametrize("shrunk", [0.7, 1.0, 1.4])
def test_the_gain_undoes_a_change_of_scale(shrunk):
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double().eval()
        images = torch.randn(200, 5).double()
    reference = reference_of(model, images)
    changed = {name: shrunk * value for name, value in model[2].named_parameters(prefix="2")}
    assert reference.gain(changed) == pytest.approx(1 / shrunk, abs=1e-3)


def test_where_scores_are_no_classes_there_is_no_gain():
    with seeded(0):
        model, images = nn.Linear(5, 4).double().eval(), torch.randn(50, 5).double()
    halves = {name: 0.5 * value for name, value in model.named_parameters()}
    assert reference_of(model, images, "values").gain(halves) == 1.0
    assert reference_of(model, images).gain(halves) > 1.9


def test_scores_of_every_pixel_are_classes_where_that_is_asked_for():
    expected, actual = torch.randn(3, 5, 4, 4), torch.randn(3, 5, 4, 4)
    flat = [x.movedim(1, -1).reshape(-1, 5) for x in (expected, actual)]
    torch.testing.assert_close(output_error([expected], [actual], "classes"), output_error([flat[0]], [flat[1]]))
    assert output_error([expected], [actual]) != output_error([expected], [actual], "classes")


def test_a_network_that_returns_no_real_value_is_refused():
    class Answer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 4)

        def forward(self, x):
            return self.a(x).argmax(1)

    with pytest.raises(CalibrationError, match="returns no real values"):
        reference_of(Answer().eval(), torch.randn(20, 5))


@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 1.0])
def test_a_golden_section_finds_the_lowest_point(place):
    assert golden_section(lambda x: abs(x - place), 0.0, 1.0) == pytest.approx(place, abs=1e-4)
