"""Recoveries by name: each against what it should be by hand, on every wiring, and through every later stage."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.baselines import plan_without_refit
from torch import nn

import recoup
from recoup.channels.structure import named_tensors
from recoup.errors import CalibrationError, UsageError
from recoup.inputs.split import BATCH_BYTES
from recoup.methods import published
from recoup.recovery import registry
from recoup.recovery.batch_norm import estimated_statistics
from recoup.recovery.choose import reference_of
from recoup.recovery.one_pass import recover_in_one_pass
from recoup.recovery.registry import JOINT_STEPS, ONE_PASS_FAMILY, RECOVERIES, REFINE_SECONDS, recover_by_name
from recoup.recovery.sequential import recover_in_sequence
from recoup.surgery.apply import masked
from tests.recovery.bench import fast
from tests.test_laws import draw_keep
from tests.zoo import ZOO, seeded

DOCS = Path(__file__).parents[2] / "docs"
EVERY = recoup.Paper(weighting="none", positions=None)
FAMILY = ("none", "mean-shift", "batch-norm", "one-pass", "rescale")
# Every group of these small networks may be cut, whatever the paper spares.
EVERYWHERE = {"unit": "layer", "classifier": True}
WITH_BATCH_NORM = ("residual", "depthwise", "concat", "shared", "one-dim", "fixed")


def calibrated(model, batch, method=EVERY):
    batches = batch if isinstance(batch, list) else [batch]
    split = recoup.split(model, batches, held_out=method.holds_out)
    return recoup.calibrate(recoup.trace(model, batches[0]), split, method)


def of_the_zoo(name, method=EVERY):
    model, batch = ZOO[name].build(), ZOO[name].batch(48)
    calibration = calibrated(model, [batch], method)
    return model, batch, calibration, draw_keep(calibration.structure, 3)


class Pair(nn.Module):
    """Two linear layers with nothing between: what the second reads can be written down."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.b(self.a(x).relu())


def pair():
    with seeded(0):
        model = Pair().double().eval()
        x = torch.randn(200, 5, dtype=torch.float64)
    keep = torch.tensor([True, False, True, True, False, False])
    with torch.no_grad():
        hidden = model.a(x).relu()
    return model, x, hidden, keep


def recovered_outputs(name):
    model, x, hidden, keep = pair()
    plan = recoup.recover(calibrated(model, x), {"a": keep}, recovery=name).plan
    with torch.no_grad():
        return recoup.apply(model, plan)(x), model.b.weight.T, hidden, keep


def test_there_are_eight_and_the_published_methods_take_five():
    assert tuple(RECOVERIES) == (*FAMILY, "in-sequence", "joint", "refined")
    assert tuple(ONE_PASS_FAMILY) == FAMILY


def test_the_docs_have_every_name_and_no_other():
    text, _ = (DOCS / "recoveries.md").read_text().split("## Retraining\n")
    assert re.findall(r"^\| `([\w-]+)` \|", text, flags=re.MULTILINE) == list(RECOVERIES)
    assert f"{REFINE_SECONDS:g} seconds" in text


def test_none_only_cuts():
    found, W, hidden, keep = recovered_outputs("none")
    torch.testing.assert_close(found, hidden[:, keep] @ W[keep])


def test_a_mean_shift_adds_the_mean_of_what_went():
    found, W, hidden, keep = recovered_outputs("mean-shift")
    torch.testing.assert_close(found, hidden[:, keep] @ W[keep] + hidden[:, ~keep].mean(0) @ W[~keep])
    torch.testing.assert_close(found.mean(0), (hidden @ W).mean(0), rtol=0, atol=1e-14)


def test_one_pass_is_least_squares():
    found, W, hidden, keep = recovered_outputs("one-pass")
    wanted = hidden @ W
    design = torch.cat([hidden[:, keep], torch.ones(len(hidden), 1)], dim=1)
    torch.testing.assert_close(found, design @ torch.linalg.lstsq(design, wanted).solution, rtol=1e-4, atol=1e-5)


def test_rescaled_outputs_have_their_old_mean_and_variance():
    found, W, hidden, _ = recovered_outputs("rescale")
    torch.testing.assert_close(found.mean(0), (hidden @ W).mean(0))
    torch.testing.assert_close(found.var(0), (hidden @ W).var(0))


def test_rescale_is_what_the_released_code_does():
    _, _, calibration, keep = of_the_zoo("residual", recoup.Released())
    named, own = recoup.recover(calibration, keep, recovery="rescale"), recoup.recover(calibration, keep)
    assert named.plan.weights.keys() == own.plan.weights.keys()
    assert all(torch.equal(value, own.plan.weights[name]) for name, value in named.plan.weights.items())


@pytest.mark.parametrize("name", ["residual", "shared", "windows"])
def test_none_makes_the_network_of_a_plan_that_writes_nothing(name):
    model, _, calibration, keep = of_the_zoo(name)
    smaller = recoup.apply(model, recoup.recover(calibration, keep, recovery="none").plan)
    bare = recoup.apply(model, plan_without_refit(calibration.structure, keep))
    expected = bare.state_dict()
    assert smaller.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in smaller.state_dict().items())


def test_a_mean_shift_is_that_of_each_outputs_own_rows():
    """With a weight for each output, a layer that opens on other rows for each has other means too."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
        x = torch.randn(500, 6).double()
    calibration = calibrated(model, x, recoup.Paper(weighting="outputs", positions=None, **EVERYWHERE))
    keep = torch.arange(8) % 2 == 0
    plan = recoup.recover(calibration, {"0": keep}, recovery="mean-shift").plan
    with torch.no_grad():
        hidden, before = model[:2](x), model[:3](x)
        after = hidden @ plan.weights["2.weight"].T + plan.weights["2.bias"]
        weights = (before > 0).double()
    left = (weights * (after - before)).sum(0) / weights.sum(0).clamp(min=1)
    assert left.abs().max() < 1e-12


@pytest.mark.parametrize("name", ["residual", "concat", "several", "flattened", "windows"])
def test_a_mean_shift_keeps_the_mean_of_every_output_of_a_layer(name):
    """On the inputs of the original, where the shift was measured: layer by layer, with what comes before it whole."""
    _, _, calibration, keep = of_the_zoo(name)
    plan = recoup.recover(calibration, keep, recovery="mean-shift").plan
    for consumer in calibration.structure.consumers:
        seen = calibration.statistics.get(consumer.name)
        if consumer.weight not in plan.weights or not consumer.biases or seen is None:
            continue
        before, after = calibration.parameters[consumer.weight], plan.weights[consumer.weight]
        kept = calibration.structure.keep_indices(consumer.inputs, keep)
        along = [slice(None)] * consumer.input_dim
        assert torch.equal(after[(*along, kept)], before[(*along, kept)])
        assert not after[(*along, ~kept)].any()
        bias = calibration.parameters.get(consumer.biases[0])
        old, new = (
            w.movedim(consumer.input_dim, 1).flatten(1) @ seen.mean + (0 if b is None else b)
            for w, b in ((before, bias), (after, plan.weights[consumer.biases[0]]))
        )
        torch.testing.assert_close(new, old, rtol=0, atol=1e-13)


def test_batch_norms_hold_what_a_pass_by_hand_finds_in_the_smaller_network(monkeypatch):
    model, batch, calibration, keep = of_the_zoo("residual")
    batches = [batch[:32], batch[32:]]
    monkeypatch.setitem(BATCH_BYTES, "cpu", batches[0].numel() * batches[0].element_size())
    calibration = calibrated(model, batches)
    plan = recoup.recover(calibration, keep, recovery="batch-norm").plan
    smaller, cut = (recoup.apply(model, p) for p in (plan, recoup.recover(calibration, keep, recovery="none").plan))
    sums = {}

    def see(name):
        def hook(norm, args):
            (x,) = args
            total = sums.setdefault(name, [0, 0.0, 0.0, 0.0])
            mean = x.mean((0, 2, 3))
            for place, value in enumerate((1, mean, x.var((0, 2, 3)), mean**2)):
                total[place] += len(x) * value

        return hook

    for name, module in cut.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.register_forward_pre_hook(see(name))
    with torch.no_grad():
        for part in batches:
            cut(part)
    norms = {name: m for name, m in smaller.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert norms.keys() == sums.keys() and len(sums) == 6
    for name, (count, mean, variance, square) in sums.items():
        torch.testing.assert_close(norms[name].running_mean, mean / count)
        within, between = variance / count, square / count - (mean / count) ** 2
        torch.testing.assert_close(norms[name].running_var, within + between)
        assert torch.equal(norms[name].weight, cut.get_submodule(name).weight)


@pytest.mark.parametrize("sizes", [[16, 16, 16], [1] * 48, [47, 1]])
def test_batch_norms_do_not_depend_on_how_the_caller_cut_the_batches(sizes):
    model, batch, _, keep = of_the_zoo("residual")
    batch = batch * torch.linspace(0.2, 3, len(batch))[:, None, None, None]  # one batch is unlike the other
    plans = [
        recoup.recover(calibrated(model, batches), keep, recovery="batch-norm").plan
        for batches in ([batch], list(batch.split(sizes)))
    ]
    for name, value in plans[0].weights.items():
        torch.testing.assert_close(plans[1].weights[name], value, rtol=1e-9, atol=1e-9)


def test_batches_of_one_sample_are_put_together_in_the_last_place_too(monkeypatch):
    """41 vectors in batches of 20: a batch norm on vectors cannot see the last one alone."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
        x = torch.randn(41, 5).double()
    monkeypatch.setitem(BATCH_BYTES, "cpu", 20 * 5 * 8)
    result = recoup.prune(
        model, list(x.split(20)), widths={"0": 4}, method=recoup.Paper(recovery="batch-norm", **EVERYWHERE)
    )
    seen = model[0](x)[:, result.plan.keep["0"]].detach()
    torch.testing.assert_close(result.model[1].running_mean, seen.mean(0))


def test_one_sample_has_no_variance():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    seen = calibrated(model, torch.randn(1, 5))
    with pytest.raises(CalibrationError, match="one value per channel, which has no variance. Give more samples"):
        recoup.recover(seen, {"0": torch.arange(8) < 4}, recovery="batch-norm")


def test_a_batch_norm_of_two_names_is_cut_and_estimated():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
            self.stem = nn.Sequential(self.conv, self.bn, nn.ReLU())

        def forward(self, x):
            return self.head(self.stem(x)).mean((2, 3))

    with seeded(0):
        model, x = Twice().double().eval(), torch.randn(40, 3, 8, 8).double()
    half = recoup.Budget(width=0.5)
    smaller = recoup.prune(model, [x], budget=half, method=recoup.Paper(recovery="batch-norm", **EVERYWHERE)).model
    assert smaller.bn is smaller.stem[1]
    with torch.no_grad():
        torch.testing.assert_close(smaller.bn.running_mean, smaller.conv(x).mean((0, 2, 3)))


@pytest.mark.parametrize("name", WITH_BATCH_NORM)
def test_batch_norms_are_proven_saved_and_loaded(name, tmp_path):
    model, batch, _, _ = of_the_zoo(name)
    half = recoup.Budget(width=0.5)
    result = recoup.prune(model, [batch], budget=half, method=recoup.Paper(recovery="batch-norm", **EVERYWHERE))
    written = [key for key in result.plan.weights if "running" in key]
    assert written and all(result.plan.shapes[key] == tuple(result.plan.weights[key].shape) for key in written)
    assert result.report.proof.difference < 1e-10
    assert (result.report.form is not None) == (name == "fixed")
    loaded = recoup.load(result.save(tmp_path / "smaller"), model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(batch), result.model(batch))
        torch.testing.assert_close(masked(model, result.plan).eval()(batch), result.model(batch))
    kept = named_tensors(result.model)
    assert all(torch.equal(value, kept[key]) for key, value in named_tensors(loaded).items() if "running" in key)


class Functional(nn.Module):
    """A batch norm that is no module, and one of weights that are computed."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 6, 3), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x):
        weight = self.b.weight / self.b.weight.flatten(1).norm(dim=1)[:, None, None, None]
        x = F.batch_norm(self.a(x), self.mean, self.spread, self.scale, None, False, 0.1, 1e-3)
        return self.head(F.conv2d(x.relu(), weight, self.b.bias).relu().mean((2, 3)))


def test_a_batch_norm_that_is_a_function_is_estimated_too():
    with seeded(0):
        model, x = Functional().double().eval(), torch.randn(60, 3, 8, 8, dtype=torch.float64)
    widths = {"a": 3}
    result = recoup.prune(model, [x], widths=widths, method=recoup.Paper(recovery="batch-norm", **EVERYWHERE))
    assert result.report.form is not None  # the class would compute the weight again
    kept = result.plan.keep["a"]
    with torch.no_grad():
        seen = model.a(x)[:, kept]
    torch.testing.assert_close(result.model.mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(result.model.spread, seen.var((0, 2, 3)))
    assert torch.equal(result.plan.weights["mean"][~kept], model.mean[~kept])


def test_a_batch_norm_in_the_form_that_graphs_have_is_estimated_too():
    class Decomposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.bn, self.b = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)

        def forward(self, x):
            bn = self.bn
            call = torch.ops.aten._native_batch_norm_legit_no_training
            made, *_ = call(self.a(x), bn.weight, bn.bias, bn.running_mean, bn.running_var, 0.1, bn.eps)
            return self.b(made.relu()).mean((2, 3))

    with seeded(0):
        model, x = Decomposed().double().eval(), torch.randn(60, 3, 8, 8).double()
    found = estimated_statistics(model, [(1, x)])
    with torch.no_grad():
        torch.testing.assert_close(found["bn.running_mean"], model.a(x).mean((0, 2, 3)))
        torch.testing.assert_close(found["bn.running_var"], model.a(x).var((0, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_half_precision_are_summed_in_more(dtype):
    """65,000 values of about 7: their sum is beyond float16, and beyond the digits of bfloat16."""
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 1)).to(dtype).eval()
    x = (7 + torch.randn(16, 1, 64, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = estimated_statistics(model, [(1, x)])
    torch.testing.assert_close(found["0.running_mean"].double(), x.double().mean((0, 2, 3)), rtol=4e-3, atol=0)
    torch.testing.assert_close(found["0.running_var"].double(), x.double().var((0, 2, 3)), rtol=8e-3, atol=0)


def test_without_a_batch_norm_there_is_nothing_to_estimate():
    model, x, _, keep = pair()
    with pytest.raises(UsageError, match="has no batch norm with running statistics.*mean-shift"):
        recoup.recover(calibrated(model, x), {"a": keep}, recovery="batch-norm")


def test_batch_norms_read_the_images_a_second_time():
    model, batch = ZOO["residual"].build(), ZOO["residual"].batch(48)
    method = recoup.Paper(recovery="batch-norm", **EVERYWHERE)
    with pytest.raises(CalibrationError, match="calibration is an iterator that can be read only once.*Pass a list"):
        recoup.prune(model, iter([batch]), budget=recoup.Budget(macs=0.5), method=method)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("recovery", ["none", "mean-shift"])
def test_every_wiring_is_cut_and_shifted(name, recovery):
    model, batch, calibration, keep = of_the_zoo(name)
    plan = recoup.recover(calibration, keep, recovery=recovery).plan
    proof = recoup.verify(model, plan, recoup.apply(model, plan), batch)
    assert proof.difference < 1e-10


def test_the_search_judges_by_the_recovery_that_was_asked_for():
    model, batch = ZOO["residual"].build(8), ZOO["residual"].batch(200)
    with torch.no_grad():
        labelled = [(batch, model(batch).argmax(1))]

    def pruned(recovery):
        method = recoup.Paper(recovery=recovery, steps=2, **EVERYWHERE)
        return recoup.prune(model, [batch], validation=labelled, tolerance=4.0, method=method)

    for recovery in ("none", "mean-shift"):
        result = pruned(recovery)
        assert result.report.method["recovery"] == recovery
        assert 100 - recoup.accuracy(result.model, labelled) == pytest.approx(result.report.score.drop)
        assert any("bias" in key for key in result.plan.weights) == (recovery != "none")


def test_in_sequence_and_jointly():
    model, batch, calibration, keep = of_the_zoo("residual", fast(joint_steps=2, refine=0.3))
    start = recoup.recover(calibration, keep, recovery="one-pass").plan
    plain = recover_in_sequence(calibration, calibration.split, keep, start)
    named = recoup.recover(calibration, keep, recovery="in-sequence")
    body = [key for key in plain.weights if not key.startswith("head")]  # class scores may be scaled
    assert body and all(torch.equal(named.plan.weights[key], plain.weights[key]) for key in body)
    assert list(named.errors) == ["in sequence"]
    joint = recoup.recover(calibration, keep, recovery="joint")
    steps = recover_in_sequence(calibration, calibration.split, keep, start, joint_steps=2)
    assert all(torch.equal(joint.plan.weights[key], steps.weights[key]) for key in body)
    assert any(not torch.equal(joint.plan.weights[key], plain.weights[key]) for key in body)
    refined = recoup.recover(calibration, keep, recovery="refined")
    assert list(refined.errors) == ["joint", "refined"] and refined.error <= joint.error
    assert recoup.verify(model, refined.plan, recoup.apply(model, refined.plan), batch).difference < 1e-10


def test_held_out_images_judge_every_recovery_of_a_method_that_has_some():
    _, _, calibration, keep = of_the_zoo("residual", recoup.Fast())
    errors = {name: recoup.recover(calibration, keep, recovery=name).error for name in FAMILY}
    assert errors["one-pass"] < errors["mean-shift"] < errors["none"]


@pytest.mark.parametrize("name", ["in-sequence", "joint", "refined"])
def test_what_needs_held_out_images_says_whose_calibration_it_takes(name):
    model, x, _, keep = pair()
    with pytest.raises(UsageError, match=r"Paper refits layers in one pass. Calibrate with Best\(\) or Fast\(\)"):
        recoup.recover(calibrated(model, x), {"a": keep}, recovery=name)
    with pytest.raises(UsageError, match="none, mean-shift, batch-norm, one-pass, rescale; calibrate with Best"):
        recoup.Paper(recovery=name)


def test_an_unknown_name_is_refused():
    model, x, _, keep = pair()
    with pytest.raises(UsageError, match="unknown recovery 'meanshift'.*Did you mean 'mean-shift'"):
        recoup.recover(calibrated(model, x), {"a": keep}, recovery="meanshift")
    with pytest.raises(UsageError, match="unknown recovery 3"):
        recoup.Paper(recovery=3)
    with pytest.raises(TypeError):
        recoup.Released(recovery="none")


def test_fast_refits_jointly_with_a_few_steps_of_its_own(monkeypatch):
    model, batch = ZOO["plain"].build(), ZOO["plain"].batch(60)
    calibration = calibrated(model, batch, recoup.Fast(outputs="values"))
    asked = []

    def spy(*args, joint_steps, **kwargs):
        asked.append(joint_steps)
        return recover_in_sequence(*args, joint_steps=joint_steps, **kwargs)

    monkeypatch.setattr(registry, "recover_in_sequence", spy)
    keep = draw_keep(calibration.structure, 3)
    recoup.recover(calibration, keep, recovery="joint")
    recoup.recover(calibration, keep, recovery="in-sequence")
    assert asked == [JOINT_STEPS, 0] and JOINT_STEPS == 4


@pytest.mark.parametrize("name", ["in-sequence", "joint"])
def test_class_scores_are_scaled_to_err_least(name):
    """The last layer's weights are those of the refits times one factor: the one that the held-out images ask for."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 5)).double().eval()
        x = torch.randn(300, 6).double()
    calibration = calibrated(model, x, recoup.Fast(outputs="classes"))
    keep = {"0": torch.arange(24) % 4 == 0}
    found = recoup.recover(calibration, keep, recovery=name).plan
    mask = calibration.structure.keep_all()
    mask[calibration.structure.group("0").channels] = keep["0"]
    steps = JOINT_STEPS if name == "joint" else 0
    start = recover_in_one_pass(calibration, mask)
    plain = recover_in_sequence(calibration, calibration.split, mask, start, joint_steps=steps)
    gain = reference_of(calibration).gain(plain.weights)
    assert abs(gain - 1) > 1e-3
    torch.testing.assert_close(found.weights["2.weight"], gain * plain.weights["2.weight"])


def test_what_the_search_has_recovered_is_not_recovered_again(monkeypatch):
    model, batch = ZOO["plain"].build(), ZOO["plain"].batch(60)
    made = []
    monkeypatch.setattr(published, "recover_by_name", lambda *args: made.append(1) or recover_by_name(*args))
    method = recoup.Paper(recovery="mean-shift", **EVERYWHERE)
    seen = calibrated(model, batch, method)
    found = recoup.allocate(seen, recoup.rank(seen), recoup.Goal(tolerance=5.0, evaluate=lambda _: 90.0))
    tried = len(made)
    assert recoup.recover(seen, found).plan is found.recovered.plan
    assert len(made) == tried > 0


def test_paper_weighs_no_row_by_a_comparison():
    """A layer whose outputs are only compared has no slope behind it: rows count alike, and nothing fails."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)

        def forward(self, x):
            y = self.b(self.a(x).relu())
            return self.c((y > 0).to(y.dtype)) + self.c(torch.frexp(y)[0])

    with seeded(0):
        model, x = Gate().double().eval(), torch.randn(200, 6).double()
    result = recoup.prune(model, [x], widths={"a": 4}, method=recoup.Paper(**EVERYWHERE))
    plain = recoup.prune(model, [x], widths={"a": 4}, method=recoup.Paper(weighting="none", **EVERYWHERE))
    torch.testing.assert_close(result.model(x), plain.model(x))
