import pytest
import torch
from torch import nn

import recoup
from recoup.errors import VerificationError
from recoup.plan import Plan, Slice
from recoup.surgery.apply import apply, masked
from recoup.surgery.comparison import compare
from recoup.surgery.verify import verify
from tests.test_laws import calibrated, draw_keep
from tests.zoo import ZOO


def test_layers_know_their_new_sizes():
    entry = ZOO["depthwise"]
    smaller = recoup.prune(entry.build(8), [entry.batch()], budget=recoup.Budget(width=0.5)).model
    first, norm, middle, last = smaller[0][0], smaller[0][1], smaller[1], smaller[2][2]
    assert (first.in_channels, first.out_channels, norm.num_features) == (3, 4, 4)
    assert (middle.groups, middle.in_channels, middle.out_channels) == (4, 4, 4)
    assert (last.in_channels, smaller[4].in_features) == (4, last.out_channels)
    windows = ZOO["windows"]
    pruned = recoup.prune(windows.build(8), [windows.batch()], budget=recoup.Budget(width=0.5)).model
    assert pruned.slope.num_parameters == len(pruned.slope.weight) == pruned.c.out_channels


def test_flags_of_parameters_and_modules_carry_over():
    entry = ZOO["plain"]
    model = entry.build(6).train()
    model[0][2][0].weight.requires_grad_(False)
    smaller = recoup.prune(model, [entry.batch()], budget=recoup.Budget(width=0.5)).model
    assert smaller.training
    assert smaller[0][2][0].weight.requires_grad is False
    assert smaller[0][2][0].bias.requires_grad is False
    assert smaller[2].weight.requires_grad is True


def test_the_smaller_model_can_be_trained():
    entry = ZOO["residual"]
    smaller = recoup.prune(entry.build(6).train(), [entry.batch()], budget=recoup.Budget(width=0.5)).model
    smaller(entry.batch(8)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in smaller.parameters())


def test_the_masked_model_has_the_original_size():
    model, seen = calibrated("residual", 5)
    plan = recoup.recover(seen, draw_keep(seen.structure, 1)).plan
    twin = masked(model, plan)
    shapes = {name: p.shape for name, p in twin.named_parameters()}
    assert all(shapes[name] == p.shape for name, p in model.named_parameters())


def proof_of(model, plan, inputs):
    return verify(model, plan, apply(model, plan), inputs)


def broken_plan(seen, keep):
    """A plan that takes the wrong rows of one layer: the same number of them, so nothing crashes."""
    plan = recoup.recover(seen, keep).plan
    wrong = [
        Slice(s.tensor, s.dim, s.kept.roll(1)) if (s.tensor, s.dim) == ("a.0.0.weight", 0) else s for s in plan.slices
    ]
    return Plan(plan.keep, tuple(wrong), plan.weights, plan.shapes)


def test_a_wrong_cut_is_refused():
    model, seen = calibrated("residual", 5)
    keep = seen.structure.keep_all()
    keep[seen.structure.group("a.0.0").start] = False
    with pytest.raises(VerificationError, match="the smaller model differs from the masked original by .*not returned"):
        proof_of(model, broken_plan(seen, keep), seen.traced.inputs)


def test_a_crash_is_refused():
    model, seen = calibrated("residual", 5)
    keep = seen.structure.keep_all()
    keep[seen.structure.group("a.0.0").start] = False
    plan = recoup.recover(seen, keep).plan
    fewer = Plan(plan.keep, plan.slices[:1], plan.weights, plan.shapes)
    with pytest.raises(VerificationError, match="the smaller Residual crashes"):
        proof_of(model, fewer, seen.traced.inputs)


def test_outputs_of_another_form_are_refused():
    with pytest.raises(VerificationError, match=r"returns shape \(2, 3\) where the original returns shape \(2, 4\)"):
        compare([torch.zeros(2, 4)], [torch.zeros(2, 3)])


def test_not_a_number_is_not_equal():
    with pytest.raises(VerificationError, match="differs"):
        compare([torch.ones(2, 4)], [torch.full((2, 4), torch.nan)])


def test_a_model_that_insists_on_its_precision_is_compared_in_it():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)).float())

    result = recoup.prune(Single(), [torch.randn(40, 3)], budget=recoup.Budget(width=0.5))
    assert result.report.proof.allowed == 1e-4
    assert result.model.a.out_features == 3


def computed():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 6))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def test_a_weight_computed_from_parameters_is_stored_and_cut():
    result = recoup.prune(computed(), [torch.randn(40, 3)], budget=recoup.Budget(width=0.5))
    shapes = {name: tuple(p.shape) for name, p in result.model.named_parameters() if p.dim() > 1}
    shapes |= {name: tuple(b.shape) for name, b in result.model.named_buffers() if b.dim() > 1}
    assert sorted(shapes.values()) == [(2, 3), (3, 3), (3, 3)]


def test_a_class_that_is_kept_leaves_its_computed_weight_alone_and_the_rest_is_pruned():
    result = recoup.prune(computed(), [torch.randn(40, 3)], budget=recoup.Budget(width=0.5), keep_class=True)
    assert result.model[0].weight.shape == (6, 3)
    assert result.model[2].weight.shape == (3, 6)


def test_apply_needs_no_search_for_its_plan():
    model, seen = calibrated("plain", 5)
    plan = recoup.recover(seen, seen.structure.keep_all()).plan
    assert plan.slices == ()
    assert apply(model, plan) is not model
