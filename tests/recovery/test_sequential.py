import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import recoup
from recoup.algebra.ridge import Joint
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.recovery.sequential import recover_in_sequence
from recoup.surgery.apply import masked
from recoup.surgery.verify import verify
from tests.oracles import least_squares, records_of, unfolded
from tests.recovery.bench import Written, bench, fast, zoo_bench
from tests.test_laws import draw_keep, make_copies, with_twins
from tests.zoo import ZOO, seeded

NAMES = pytest.mark.parametrize("name", ZOO)
EXACT = {"ridge": 1e-13, "ridges": (1e-10, math.inf), "positions": None}


def recovered(found, start=None):
    start = start or found.start
    return recover_in_sequence(found.calibration, found.split, found.keep, start, joint_steps=found.joint_steps)


def held(found):
    return [found.split.batches[place] for place in found.split.held]


def relative(actual, expected):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", ["plain", "flattened", "residual", "concat", "gates", "perceptron", "scaled"])
def test_copies_of_kept_channels_lose_nothing(name):
    """Every pruned channel is an exact copy of a kept one."""
    model = ZOO[name].build(8)
    structure = recoup.trace(model, ZOO[name].batch(2)).structure
    keep, twin = with_twins(structure, draw_keep(structure, 5))
    assert not bool(keep.all())
    make_copies(model, structure, twin)
    found = bench(model, ZOO[name].batch(60), keep, **EXACT)
    plan = recovered(found)
    for inputs in held(found):
        with torch.no_grad():
            expected = inputs.call(model)
        assert relative(found.whole(plan, inputs), [expected]) < 1e-6


@pytest.mark.parametrize("joint_steps", [0, 2])
def test_half_of_a_network_of_pairs_is_the_network(joint_steps):
    with seeded(0):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(128, 4),
        ).double().eval()  # fmt: skip
        images = torch.randn(300, 3, 8, 8).double()
    for layer in (model[0], model[3]):
        layer.weight.data[4:], layer.bias.data[4:] = layer.weight.data[:4], layer.bias.data[:4]
    half = torch.arange(8) < 4
    found = bench(model, images, {"0": half, "3": half}, joint_steps=joint_steps, **EXACT)
    smaller = recoup.apply(model, recovered(found))
    assert smaller[0].out_channels == smaller[3].out_channels == 4
    with torch.no_grad():
        torch.testing.assert_close(smaller(images), model(images), rtol=1e-6, atol=1e-6)


class Stream(nn.Module):
    """A stream that a norm scales, a linear branch added to it, and a head that reads both."""

    def __init__(self, between=None):
        super().__init__()
        self.a, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.branch, self.after, self.head = nn.Linear(6, 6), between or nn.Identity(), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(torch.tanh(self.a(x)))
        return self.head(torch.tanh(x + self.after(self.branch(x))))


def scaled_stream(factor, between=None):
    """The network, and a plan that prunes nothing but multiplies the stream by a factor."""
    with seeded(0):
        model = Stream(between).double().eval()
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm1d)):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
        images = torch.randn(200, 5).double()
    found = bench(model, images, {}, **EXACT)
    written = {f"norm.{kind}": factor * getattr(model.norm, kind).detach() for kind in ("weight", "bias")}
    return model, images, found, replace(found.start, weights=written)


def test_a_residual_branch_makes_up_for_an_error_of_its_stream():
    """The stream is 2 s in the place of s, so s + B s is restored by (B - I) / 2."""
    model, images, found, start = scaled_stream(2.0)
    plan = recovered(found, start)
    expected = (model.branch.weight.detach() - torch.eye(6).double()) / 2
    torch.testing.assert_close(plan.weights["branch.weight"], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plan.weights["head.weight"], model.head.weight.detach(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(masked(model, plan)(images), model(images), rtol=1e-6, atol=1e-6)
        assert relative([masked(model, start)(images)], [model(images)]) > 0.1


def test_what_the_branch_adds_is_scaled_by_what_lies_between():
    model, images, found, start = scaled_stream(2.0, nn.BatchNorm1d(6))
    plan = recovered(found, start)
    with torch.no_grad():
        torch.testing.assert_close(masked(model, plan)(images), model(images), rtol=1e-6, atol=1e-6)


def test_a_layer_whose_input_merely_drifted_is_refitted():
    """All that reads relu(2 x) in the place of relu(x) is halved."""
    with seeded(0):
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Tanh(), nn.Flatten(),
            nn.Linear(80, 3),
        ).double().eval()  # fmt: skip
        nn.init.uniform_(model[1].bias, 0.5, 1.0)
        images = torch.randn(150, 3, 8, 8).double()
    found = bench(model, images, {}, **EXACT)
    start = replace(
        found.start, weights={f"1.{kind}": 2 * getattr(model[1], kind).detach() for kind in ("weight", "bias")}
    )
    plan = recovered(found, start)
    torch.testing.assert_close(plan.weights["3.weight"], model[3].weight.detach() / 2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plan.weights["3.bias"], model[3].bias.detach(), rtol=1e-6, atol=1e-6)
    assert "0.weight" not in plan.weights
    with torch.no_grad():
        torch.testing.assert_close(masked(model, plan)(images), model(images), rtol=1e-5, atol=1e-5)
    assert plan.recovery["3"].residual < 1e-10


def test_where_nothing_is_pruned_nothing_is_refitted():
    found = zoo_bench("residual", keep={})
    plan = recovered(found)
    assert not plan.weights
    assert not plan.recovery


def test_layers_before_the_first_that_is_touched_stay():
    """Only the second group of the chain loses channels."""
    with seeded(0):
        model = nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
        ).double().eval()  # fmt: skip
        found = bench(model, torch.randn(80, 5).double(), {"2": torch.arange(7) < 4})
    assert {name.split(".")[0] for name in recovered(found).weights} == {"4", "6"}


def test_a_layer_is_fitted_by_least_squares_on_what_it_reads_in_the_pruned_network():
    found = zoo_bench("plain", samples=60, seed=5, ridges=(0.0,), positions=None)
    plan = recovered(found)
    twin = masked(found.model, plan)
    masks, (seen,) = plan.keep, (found.split.batches[place].args[0] for place in found.split.fit)
    for name, kept in (("0.2.0", masks["0.0.0"]), ("2", masks["0.2.0"])):
        assert not bool(kept.all())
        read, _ = records_of(twin, name, seen)
        _, target = records_of(found.model, name, seen)
        layer = found.model.get_submodule(name)
        is_conv = isinstance(layer, nn.Conv2d)
        rows = unfolded(read, layer) if is_conv else read
        rows = rows[:, kept.repeat_interleave(9 if is_conv else 1)]
        made = target.flatten(2).transpose(1, 2).flatten(0, 1) if is_conv else target
        slope, intercept = least_squares(rows, made)
        weight = plan.weights[f"{name}.weight"].flatten(1).T[kept.repeat_interleave(9 if is_conv else 1)]
        # Rows of the producer that are pruned keep their one-pass weights: nobody reads what they make.
        outputs = masks["0.2.0"] if is_conv else torch.ones(4, dtype=torch.bool)
        torch.testing.assert_close(weight[:, outputs], slope[:, outputs], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plan.weights[f"{name}.bias"][outputs], intercept[outputs], rtol=1e-5, atol=1e-6)


@NAMES
@pytest.mark.parametrize("joint_steps", [0, 1])
def test_pruned_inputs_keep_zero_weights_and_sliced_equals_masked(name, joint_steps):
    found = zoo_bench(name, seed=5, joint_steps=joint_steps)
    plan = recovered(found)
    structure = found.calibration.structure
    for consumer in structure.consumers:
        cut = ~structure.keep_indices(consumer.inputs, found.keep)
        if consumer.weight in plan.weights:
            assert not plan.weights[consumer.weight].movedim(consumer.input_dim, 0)[cut].any()
        else:
            assert not cut.any()
    smaller = recoup.apply(found.model, plan)
    proof = verify(found.model, plan, smaller, found.calibration.traced.inputs)
    assert proof.difference < 1e-8


def test_with_an_infinite_ridge_alone_every_weight_stays_where_it_was():
    found = zoo_bench("residual", seed=5, ridges=(math.inf,))
    plan = recovered(found)
    for point in found.schedule.points:
        before = found.start.weights.get(point.consumer.weight, found.calibration.parameters[point.consumer.weight])
        torch.testing.assert_close(plan.weights[point.consumer.weight], before, rtol=0.0, atol=1e-12)


def test_held_out_images_choose_the_ridge_that_suits_them_best():
    ridges = (1e-8, 1e-2, 1.0, math.inf)
    found = zoo_bench("plain", samples=30, width=12, seed=5)

    def fitted(*choices):
        calibration = replace(found.calibration, method=fast(ridges=choices))
        plan = recover_in_sequence(calibration, found.split, found.keep, found.start)
        return plan.recovery["0.2.0"].residual, plan.weights["0.2.0.weight"]

    single = {ridge: fitted(ridge) for ridge in ridges}
    best = min(ridges, key=lambda ridge: single[ridge][0])
    for choices in (ridges, ridges[::-1]):
        residual, weight = fitted(*choices)
        assert residual == pytest.approx(single[best][0])
        assert torch.equal(weight, single[best][1])


def test_recovery_in_sequence_has_less_output_error_on_new_images_than_one_pass():
    """A chain that loses a third of every layer."""
    with seeded(0):
        layers = [layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.ReLU())]
        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), *layers, nn.Linear(24, 5)).double().eval()
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        images = torch.randn(2000, 12).double()
    third = {str(2 * number): torch.arange(24) < 16 for number in range(5)}
    found = bench(model, images, third)
    plan = recovered(found)
    assert found.reference.error(plan.weights) < 0.9 * found.reference.error(found.start.weights)


def test_a_layer_with_too_many_inputs_is_left_as_it_is(monkeypatch):
    found = zoo_bench("plain", seed=5)
    monkeypatch.setattr("recoup.statistics.calibrate.MOST_INPUTS", 0)
    plan = recovered(found)
    assert plan.weights.keys() == found.start.weights.keys()
    assert all(torch.equal(value, plan.weights[name]) for name, value in found.start.weights.items())


def test_a_network_that_writes_into_what_others_read_is_refitted_too():
    with seeded(0):
        model, images = Written().double().eval(), torch.randn(200, 3, 8, 8).double()
    found = bench(model, images, {"a": torch.arange(8) < 2}, joint_steps=2)
    assert not found.schedule.is_pure
    plan = recovered(found)
    assert {"b.weight", "c.weight", "head.weight"} <= plan.weights.keys()
    assert found.reference.error(plan.weights) < found.reference.error(found.start.weights)


def test_slope_weights_are_those_of_the_one_pass_fit():
    """The first layer that is cut reads what it always did: without a ridge both ways find the same weights."""
    options = {"weighting": "slope", "ridge": 0.0, "ridges": (0.0,), "positions": None}
    found = zoo_bench("plain", samples=60, seed=5, **options)
    plan = recovered(found)
    kept = plan.keep["0.2.0"]
    torch.testing.assert_close(
        plan.weights["0.2.0.weight"][kept], found.start.weights["0.2.0.weight"][kept], rtol=1e-5, atol=1e-6
    )


def test_progress_is_told_of_every_refit_point():
    found, told = zoo_bench("plain", seed=5), []
    recover_in_sequence(found.calibration, found.split, found.keep, found.start, lambda *step: told.append(step))
    assert told == [("recover", number, 2) for number in (1, 2)]


def test_the_model_and_the_start_are_as_before():
    found = zoo_bench("residual", seed=5, joint_steps=1)
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    start = {name: value.clone() for name, value in found.start.weights.items()}
    recovered(found)
    assert all(torch.equal(value, before[name]) for name, value in found.model.state_dict().items())
    assert all(torch.equal(value, start[name]) for name, value in found.start.weights.items())


def whole_again(found, group):
    """The mask, with one group as it was."""
    keep = found.keep.clone()
    keep[group.channels] = True
    return keep


@NAMES
def test_what_is_known_of_another_mask_changes_nothing(name):
    """Layers up to the first difference are not solved again, and the plan is the same to the bit."""
    found = zoo_bench(name, joint_steps=0)
    recovered(found)
    groups = found.calibration.structure.prunable
    for group in dict.fromkeys((groups[-1], groups[len(groups) // 2], groups[0])):
        keep = whole_again(found, group)
        plans = []
        for calibration in (found.calibration, replace(found.calibration)):  # the second knows nothing yet
            start = recover_in_one_pass(calibration, keep)
            plans.append(recover_in_sequence(calibration, found.split, keep, start))
        known, fresh = plans
        assert known.weights.keys() == fresh.weights.keys()
        assert all(torch.equal(known.weights[key], fresh.weights[key]) for key in fresh.weights)
        assert known.recovery == fresh.recovery


def test_layers_in_front_of_the_first_difference_are_not_solved_again(monkeypatch):
    with seeded(0):
        model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 3))
        batch = torch.randn(200, 8)
    solved = []
    fits = Joint.fits
    monkeypatch.setattr(Joint, "fits", lambda *args: solved.append(args[-1]) or fits(*args))
    half = torch.arange(8) < 4
    found = bench(model.double().eval(), batch.double(), dict.fromkeys("0246", half), joint_steps=0)
    recovered(found)
    assert solved == ["2", "4", "6", "8"]
    keep = whole_again(found, found.calibration.structure.group("4"))
    recover_in_sequence(found.calibration, found.split, keep, recover_in_one_pass(found.calibration, keep))
    assert solved[4:] == ["4", "6", "8"]
