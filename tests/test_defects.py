"""Defects that were found by use, each with the smallest network that showed it.

Parts of a split that no parameter belongs to (timm's res2next50) are in tests/tracing/test_adversaries.py.
"""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup import Budget
from recoup.errors import BudgetError, CalibrationError
from recoup.recovery import joint, sequential
from recoup.recovery.segment_problem import SegmentProblem
from recoup.statistics.rank import problem_of
from tests.zoo import ZOO, seeded


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def group_normed():
    with seeded(0):
        body = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 8, 3, padding=1),
            nn.ReLU(),
        )
        return nn.Sequential(*body, Mean(), nn.Linear(8, 5)).eval(), torch.randn(256, 3, 8, 8)


def test_a_network_with_group_norm_is_refitted_jointly():
    """Forward mode takes a group norm apart into views, which maps with their channels last do not have."""
    model, images = group_normed()
    with warnings.catch_warnings():
        warnings.simplefilter("error", recoup.RecoupWarning)
        result = recoup.prune(model, list(images.split(64)), budget=Budget(width=0.5))
    quick = recoup.prune(model, list(images.split(64)), budget=Budget(width=0.5), method="fast")
    assert result.report.held_out["in sequence"] < quick.report.held_out["in sequence"]  # joint refits took place


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [
        (joint, "refit_jointly", "the joint refit of 3 failed and is left out .RuntimeError: out of luck"),
        (sequential._Refit, "refit", "the refit in sequence of 3 failed and is left out .RuntimeError: out of luck"),
        (joint.JointRefits, "__init__", "recovery in sequence of the network failed and is left out"),
    ],
)
def test_what_fails_inside_a_recovery_does_not_end_the_run(monkeypatch, module, name, told):
    def fail(*_, **__):
        raise RuntimeError("out of luck\nwith details")

    monkeypatch.setattr(module, name, fail)
    model, images = group_normed()
    with pytest.warns(recoup.RecoupWarning, match=told):
        result = recoup.prune(model, list(images.split(64)), budget=Budget(width=0.5))
    assert result.report.proof.difference <= result.report.proof.allowed
    assert result.report.macs_removed > 0.3


def flattened_copies(seed):
    """16 of 32 channels are exact copies of the others; 512 inputs of the last layer, far more than images."""
    with seeded(seed):
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
        ).eval()
        with torch.no_grad():
            model[0].weight[16:], model[0].bias[16:] = model[0].weight[:16].clone(), model[0].bias[:16].clone()
        return model, torch.randn(256, 3, 8, 8), torch.randn(500, 3, 8, 8)


@pytest.mark.parametrize("method", ["best", "fast"])
@pytest.mark.parametrize("seed", range(3))
def test_copies_behind_flatten_are_found_with_fewer_images_than_inputs(method, seed):
    model, images, fresh = flattened_copies(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.RecoupWarning)
        result = recoup.prune(model, list(images.split(64)), budget=Budget(width=0.5), method=method)
    kept = result.plan.keep["0"]
    assert bool((kept[:16] ^ kept[16:]).all())  # of every pair one
    with torch.no_grad():
        assert float((model(fresh) - result.model(fresh)).square().mean() / model(fresh).var()) < 1e-9


def test_filters_have_the_signs_of_the_weights():
    """A selector that compares filters, as the geometric median does, must tell a filter from its negative."""
    with seeded(0):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), Mean()).eval()
        images = torch.randn(40, 3, 8, 8)
    data = recoup.split(model, [images], held_out=False)
    seen = recoup.calibrate(recoup.trace(model, images), data, recoup.Paper())
    problem = problem_of(seen, seen.structure.group("0"))
    assert torch.equal(problem.filters, model[0].weight.detach().flatten(1))


def test_the_filters_of_a_channel_of_several_rows_are_side_by_side():
    entry = ZOO["shared"]
    model, images = entry.build(6), entry.batch()
    data = recoup.split(model, [images], held_out=False)
    seen = recoup.calibrate(recoup.trace(model, images), data, recoup.Paper())
    for group in seen.structure.prunable:
        filters = problem_of(seen, group).filters
        assert len(filters) == group.width and bool((filters < 0).any())


@pytest.mark.parametrize("method", ["best", "paper"])
def test_widths_may_suit_the_device(method):
    """On a CPU a register holds 16 values."""
    with seeded(0):
        model, images = (
            nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 5, 1), Mean()),
            torch.randn(60, 3, 8, 8),
        )
    made = {
        "best": recoup.Best(multiple_of="device"),
        "paper": recoup.Paper(multiple_of="device", classifier=True),
    }[method]
    result = recoup.prune(model, [images], budget=Budget(width=0.5), method=made)
    assert result.model[0].out_channels == 32


class Upwards(nn.Module):
    """A transposed convolution without a bias reads what is pruned."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 5, 3, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).mean((2, 3))


def test_a_transposed_convolution_that_got_a_bias_is_saved_and_loaded(tmp_path):
    with seeded(0):
        model, images = Upwards().eval(), torch.randn(60, 3, 8, 8)
    result = recoup.prune(model, [images], budget=Budget(width=0.5), method="fast")
    loaded = recoup.load(result.save(tmp_path / "out"), Upwards)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(images), result.model(images))


def test_training_the_result_does_not_change_the_plan():
    with seeded(0):
        model, images = Upwards().eval(), torch.randn(60, 3, 8, 8)
    result = recoup.prune(model, [images], budget=Budget(width=0.5), method="fast")
    before = {name: value.clone() for name, value in result.plan.weights.items()}
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in result.plan.weights.items())


class Sized(nn.Module):
    """A size is written into the code behind `b` only."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(torch.relu(self.b(torch.relu(self.a(x)))).view(-1, 6, 64).mean(2))


@pytest.mark.parametrize("keep_class", [False, True])
def test_a_group_that_is_left_alone_does_not_cost_the_class(keep_class):
    with seeded(0):
        model, images = Sized().eval(), torch.randn(60, 3, 8, 8)
    chosen = {"exclude": ["b"], "keep_class": keep_class}
    result = recoup.prune(model, [images], budget=Budget(width=0.5), method="fast", **chosen)
    assert type(result.model) is Sized and result.model.a.out_channels == 4
    reasons = {row.name: row.reasons for row in result.report.groups}
    assert reasons["b"] == ("left alone by request",) and "left alone by request" not in reasons["head"]


def test_a_generator_of_names_is_read_once_and_serves_throughout():
    with seeded(0):
        model, images = Sized().eval(), torch.randn(60, 3, 8, 8)
    result = recoup.prune(model, [images], budget=Budget(width=0.5), method="fast", exclude=(name for name in ["b"]))
    assert result.model.b.out_channels == 6


class WithTable(nn.Module):
    """A second input that has no batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, table):
        return self.b(torch.relu(self.a(x + table.mean(0))))


def test_an_input_without_a_batch_is_verified_as_it_is():
    with seeded(0):
        model, x, table = WithTable().eval(), torch.randn(60, 5), torch.randn(7, 5)
    result = recoup.prune(model, [((x, table), torch.zeros(60))], budget=Budget(width=0.5), method="fast")
    assert result.model.a.out_features == 4
    assert result.report.proof.difference <= result.report.proof.allowed


def test_a_calibration_with_another_method_does_not_share_what_was_computed():
    model, images = group_normed()
    seen = recoup.calibrate(recoup.trace(model, images), recoup.split(model, [images]), recoup.Fast())
    other = dataclasses.replace(seen, method=recoup.Fast(ridge=10.0))
    keep = {"0": torch.arange(4) % 2 == 0}
    plans = [recoup.recover(each, keep).plan.weights for each in (seen, other)]
    assert not torch.equal(plans[0]["3.weight"], plans[1]["3.weight"])


class EnoughError(Exception):
    """The caller has had enough."""


def test_what_the_callers_progress_raises_ends_the_run():
    model, images = group_normed()

    def progress(stage, *_):
        if stage == "recover":
            raise EnoughError

    with pytest.raises(EnoughError):
        recoup.prune(model, [images], budget=Budget(width=0.5), progress=progress)


def test_warnings_point_at_the_callers_line(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(joint, "refit_jointly", fail)
    model, images = group_normed()
    with pytest.warns(recoup.RecoupWarning) as caught:
        recoup.prune(model, [images], budget=Budget(width=0.5))
    assert {warning.filename for warning in caught if issubclass(warning.category, recoup.RecoupWarning)} == {__file__}


def test_validation_that_is_no_iterable_is_refused():
    model, images = group_normed()
    with pytest.raises(CalibrationError, match="validation must be an iterable of batches, got one int"):
        recoup.prune(model, [images], validation=5, tolerance=1.0)


def test_the_same_candidate_is_measured_once():
    """With all widths by hand there is one."""
    model, images = group_normed()
    calls = []
    recoup.prune(
        model,
        [images],
        widths={"0": 2, "3": 4},
        tolerance=50.0,
        method="fast",
        evaluate=lambda m: calls.append(m) or 90.0,
    )
    assert len(calls) <= 3


def test_budgets_out_of_reach_name_what_holds_them():
    model, images = group_normed()
    with pytest.raises(BudgetError, match="rounded up to multiples of 8"):
        recoup.prune(model, [images], budget=Budget(macs=0.05), method=recoup.Paper(multiple_of=8))
    with pytest.raises(BudgetError, match="held by widths= and min_width="):
        recoup.prune(model, [images], budget=Budget(macs=0.05), method="fast", min_width=3)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_maps_before_grouped_convolutions_keep_their_channels_first(groups):
    """With the channels last, cuDNN's gradient of such a weight writes beyond it; depthwise ones have other kernels."""
    with seeded(0):
        body = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=groups), nn.ReLU(), nn.Conv2d(16, 5, 1))
        model, images = nn.Sequential(*body, Mean()).eval(), torch.randn(60, 3, 8, 8)
    laid, plain = [], SegmentProblem.laid_out

    def spied(self, values):
        found = plain(self, values)
        laid.extend(v for v in found.values() if isinstance(v, torch.Tensor) and v.dim() == 4 and v.shape[1] > 1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentProblem, "laid_out", spied)
        recoup.prune(model, [images], budget=Budget(width=0.5))
    is_last = [value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous() for value in laid]
    assert laid and (not any(is_last) if groups == 4 else any(is_last))


def test_a_layer_that_never_opens_keeps_the_mean_of_what_it_makes():
    """Found by the fuzz: slope weights left such a layer without a mean, and what it lost was not put into its bias."""
    with seeded(0):
        shut, images = nn.Linear(8, 6), torch.randn(200, 5)
        network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), shut, nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        shut.weight.abs_().neg_()
        shut.bias.fill_(-0.01)
    result = recoup.prune(network, [images], widths={"0": 4}, method=recoup.Paper())
    before, after = network[:3](images).mean(0), result.model[:3](images).mean(0)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


class CarefulWithLargeBatches(nn.Module):
    """A branch on the number of samples, as diffusers' Upsample2D has it; its graph is that of one side."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x).relu()
        if len(x) >= 64:
            x = x.contiguous()
        return self.head(self.second(x).relu().mean((2, 3)))


def test_batches_are_not_put_together_to_more_samples_than_the_graph_takes():
    with seeded(0):
        model, batches = CarefulWithLargeBatches().eval(), [torch.randn(16, 3, 8, 8) for _ in range(8)]
    result = recoup.prune(model, batches, budget=Budget(width=0.5), method="fast")
    assert result.model.first.out_channels == 4
    assert result.report.samples == 128
