"""Laws that hold for every network in the zoo, at any width and for any choice of channels."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import recoup
from recoup.algebra.ridge import on_new_rows
from recoup.inputs.batches import inputs_of
from recoup.surgery.verify import outputs
from tests.fuzz.copies import make_copies, with_twins
from tests.oracles import least_squares, records_of, unfolded
from tests.zoo import ZOO

EXACT = recoup.Paper(weighting="none", ridge=0.0, positions=None)
names = pytest.mark.parametrize("name", ZOO)
widths, seeds = st.integers(2, 7), st.integers(0, 10_000)


@functools.lru_cache(maxsize=32)
def calibrated(name, width, method=EXACT):
    traced = traced_once(name, width)
    return traced.standalone.model, calibration(traced, [ZOO[name].batch()], method)


def calibration(traced, batches, method):
    """Statistics on all of `batches`."""
    return recoup.calibrate(traced, recoup.split(traced.standalone.model, batches, held_out=False), method)


def plan_for(seen, keep):
    return recoup.recover(seen, keep).plan


def draw_keep(structure, seed):
    """A random mask that respects locks and leaves something of every group."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(structure.width, generator=generator) < 0.6
    for group in structure.groups:
        keep[group.channels] |= group.locked
        if group not in structure.prunable:
            keep[group.channels] = True
        order = torch.randperm(group.width, generator=generator) + group.start
        keep = structure.refill(keep, order)
    return keep


def run(model, name, samples=9, seed=5):
    batch = ZOO[name].batch(samples, seed)
    with torch.no_grad():
        return outputs(model, inputs_of(batch, model))


def relative(actual, expected):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


@names
def test_keeping_everything_is_the_identity(name):
    model, seen = calibrated(name, 5)
    smaller = recoup.apply(model, plan_for(seen, seen.structure.keep_all()))
    assert all(torch.equal(a, b) for a, b in zip(run(smaller, name), run(model, name), strict=True))


@names
@given(width=widths, seed=seeds)
@settings(max_examples=20, deadline=None)
def test_sliced_equals_masked(name, width, seed):
    model, seen = calibrated(name, width, recoup.Paper())
    keep = draw_keep(seen.structure, seed)
    plan = plan_for(seen, keep)
    smaller = recoup.apply(model, plan)
    proof = recoup.verify(model, plan, smaller, seen.traced.inputs)
    assert proof.difference < 1e-10
    assert seen.traced.form is not None or type(smaller) is type(model)
    for group in seen.structure.groups:
        assert (
            sum(p.numel() for p in smaller.parameters())
            <= sum(p.numel() for p in model.parameters()) + group.width * 99
        )


@names
@given(width=widths, seed=seeds)
@settings(max_examples=12, deadline=None)
def test_copies_of_kept_channels_lose_nothing(name, width, seed):
    """Every pruned channel is made an exact copy of a kept one, for whatever wiring; then it goes.

    What is left is rounding, which the conditioning of so small a ridge enlarges.
    """
    entry, (host, traced) = ZOO[name], traced_copy(name, width)
    keep, twin = with_twins(traced.structure, draw_keep(traced.structure, seed))
    make_copies(host, traced.structure, twin)
    method = recoup.Paper(weighting="none", ridge=1e-13, positions=None)
    seen = calibration(traced, [entry.batch(60)], method)
    smaller = recoup.apply(host, plan_for(seen, keep))
    assert relative(run(smaller, name, 60, 1), run(host, name, 60, 1)) < 1e-7


@functools.cache
def traced_once(name, width):
    entry = ZOO[name]
    return recoup.trace(entry.build(width), entry.batch())


def traced_copy(name, width):
    """What is worked on, and its structure, to be changed at will."""
    traced = traced_once(name, width)
    if traced.form is None:
        model = ZOO[name].build(width)
        given = dataclasses.replace(traced.standalone.given, model=model)
        return model, dataclasses.replace(traced, standalone=dataclasses.replace(traced.standalone, given=given))
    form = dataclasses.replace(traced.form)
    form.__dict__.update(host=copy.deepcopy(traced.form.host), sizes=traced.form.sizes)
    return form.host, dataclasses.replace(traced, standalone=form)


@given(seed=seeds, width=st.integers(3, 6), ridge=st.just(0.0))
@settings(max_examples=15, deadline=None)
def test_channels_affine_in_kept_ones_lose_nothing(seed, width, ridge):
    """Without an activation between, a channel may be any affine combination of the kept ones."""
    torch.manual_seed(seed)
    model = (
        torch.nn.Sequential(torch.nn.Conv2d(3, width, 1), torch.nn.BatchNorm2d(width), torch.nn.Conv2d(width, 4, 3))
        .double()
        .eval()
    )
    keep = torch.arange(width) < 3
    model[0].weight.data[3:] = torch.einsum(
        "pk,kchw->pchw", torch.randn(width - 3, 3).double(), model[0].weight.data[:3]
    )
    x = torch.randn(30, 3, 6, 6, dtype=torch.float64)
    method = recoup.Paper(weighting="none", ridge=ridge, positions=None)
    seen = calibration(recoup.trace(model, x), [x], method)
    smaller = recoup.apply(model, plan_for(seen, {"0": keep}))
    with torch.no_grad():
        assert relative([smaller(x)], [model(x)]) < 1e-8


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("plain", "0.2.0"),
        ("windows", "b"),
        ("windows", "d"),
        ("residual", "a.1.0"),
        ("three-dim", "2"),
        ("one-dim", "0.3"),
    ],
)
def test_closed_form_is_least_squares_on_the_raw_activations(name, layer):
    entry, (model, seen) = ZOO[name], calibrated(name, 4)
    structure = seen.structure
    consumer = next(c for c in structure.consumers if c.name == layer)
    group = next(g for g in structure.prunable if layer in g.consumers)
    keep = structure.keep_all()
    keep[group.start] = False
    plan = plan_for(seen, keep)
    x, y = records_of(model, layer, entry.batch())
    rows = unfolded(x, model.get_submodule(layer))
    kept = structure.keep_indices(consumer.inputs, keep).repeat_interleave(consumer.kernel)
    targets = y.flatten(2).transpose(1, 2).flatten(0, 1)
    slope, intercept = least_squares(rows[:, kept], targets)
    fitted = rows @ plan.weights[consumer.weight].flatten(1).T + plan.weights[consumer.biases[0]]
    torch.testing.assert_close(fitted, rows[:, kept] @ slope + intercept, rtol=1e-7, atol=1e-7)
    measured = (targets - fitted).square().mean(0).sum() / targets.var(dim=0, correction=0).sum()
    expected = on_new_rows(float(measured), len(rows), int(kept.sum()))
    assert plan.recovery[layer].residual == pytest.approx(expected, rel=1e-6, abs=1e-9)


@names
def test_save_and_load_give_the_same_bits(name):
    entry = ZOO[name]
    model = entry.build(5)
    result = recoup.prune(model, [entry.batch()], budget=recoup.Budget(width=0.5))
    with tempfile.TemporaryDirectory() as tmp:
        folder = result.save(Path(tmp) / "out")
        again = recoup.load(folder, lambda: entry.build(5, seed=99))
        again_from_model = recoup.load(folder, model)
    for loaded in (again, again_from_model):
        assert all(torch.equal(a, b) for a, b in zip(run(loaded, name), run(result.model.eval(), name), strict=True))


@names
def test_the_callers_model_is_untouched(name):
    model, called = ZOO[name].build(5).train(), []
    next(model.modules()).register_forward_hook(lambda *_: called.append(1))
    next(iter(model.parameters())).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    flags = [p.requires_grad for p in model.parameters()]
    result = recoup.prune(model, [ZOO[name].batch()], budget=recoup.Budget(width=0.6))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert identities == {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(module.training for module in model.modules())
    assert len(next(model.modules())._forward_hooks) == 1
    assert len(called) == 1  # to see whether it changes what the model returns
    assert all(module.training for module in result.model.modules())
    assert all(p.grad is None for p in model.parameters())


class InPlace(nn.Module):
    """A network that scales its images where they lie."""

    def __init__(self):
        super().__init__()
        self.body = ZOO["plain"].build(6)

    def forward(self, x):
        return self.body(x.sub_(0.5).div_(0.25))


@pytest.mark.parametrize("method", ["paper", "best"])
@pytest.mark.parametrize(
    "goal", [{"budget": recoup.Budget(macs=0.6)}, {"tolerance": 90.0}], ids=["budget", "tolerance"]
)
def test_the_callers_images_are_untouched_by_a_network_that_writes_into_them(method, goal):
    images, checked = ZOO["plain"].batch(60), ZOO["plain"].batch(60, seed=2)
    before = images.clone(), checked.clone()
    validation = {"validation": [(checked, torch.arange(60) % 4)]} if "tolerance" in goal else {}
    result = recoup.prune(InPlace(), [images], method=method, **goal, **validation)
    assert torch.equal(images, before[0])
    assert torch.equal(checked, before[1])
    assert result.report.proof.difference <= result.report.proof.allowed


def test_a_network_that_writes_into_its_images_is_judged_on_what_it_was_given():
    """As the same network that does not write is."""
    images, model, budget = ZOO["plain"].batch(60), InPlace(), recoup.Budget(macs=0.6)
    writing = recoup.prune(model, [images], budget=budget)
    plain = recoup.prune(model.body, [(images - 0.5) / 0.25], budget=budget)
    assert [group.after for group in writing.report.groups] == [group.after for group in plain.report.groups]
    assert writing.report.held_out["one pass"] == pytest.approx(plain.report.held_out["one pass"], rel=1e-6)


@pytest.mark.parametrize("block", ["a", "b"])
@pytest.mark.parametrize("method", ["paper", "fast", "best"])
def test_a_block_that_is_dead_inside_is_cut_first(method, block):
    """Whatever it reads, the second layer of the block has seen nothing but zeros."""
    model = ZOO["residual"].build(6)
    norm = model.get_submodule(block)[0][1]
    nn.init.zeros_(norm.weight)
    nn.init.constant_(norm.bias, -1.0)
    images = ZOO["residual"].batch(130)
    result = recoup.prune(model, [images], budget=recoup.Budget(macs=0.6), method=method)
    row = next(group for group in result.report.groups if group.name == f"{block}.0.0")
    assert row.after <= (3 if method != "paper" else 0.75 * row.before)  # the paper cuts all groups alike
    assert result.report.constant[row.name].gone == row.before - row.after
    assert result.report.proof.difference <= result.report.proof.allowed
    assert all(p.isfinite().all() for p in result.model.parameters())


@names
def test_the_zoo_is_pruned_and_not_silently_left_alone(name):
    entry = ZOO[name]
    model = entry.build(6)
    before = sum(p.numel() for p in model.parameters())
    result = recoup.prune(model, [entry.batch()], budget=recoup.Budget(width=0.5))
    assert sum(p.numel() for p in result.model.parameters()) < before
