"""Ingredients switched one by one: each variant is what `prune` makes with that switch, at its own price."""

from dataclasses import fields, replace

import pytest
import torch
from benchmarks.ablation import VARIANTS, Shared, measured, mirrored, varied
from benchmarks.networks import removed
from benchmarks.rows import Case, Outcome, Row

import recoup
from benchmarks import ablation
from recoup import Budget
from recoup.allocation import rounds
from recoup.recovery.choose import reference_of
from tests import zoo
from tests.benchmarks.test_best import bench, images

SHARE = 0.4
SWITCHES = ("weighting", "ridges", "rounds", "joint_steps", "span")


@pytest.fixture(scope="module")
def base():
    return measured(bench(), images(0), recoup.Best())


@pytest.fixture(scope="module")
def residual():
    with zoo.seeded(3):
        model = zoo.Residual(12).eval()
    return Shared(measured(replace(bench(), model=model), many_images(), recoup.Best()))


@pytest.fixture
def second_round(residual, monkeypatch):
    """What is shared in a network whose second round finds other widths, unless recovery is in one pass."""
    monkeypatch.setattr(rounds, "WORTHWHILE", 0.99)
    return residual


def many_images():
    return [batch for seed in range(6) for batch in images(seed)]


def made(shared, name, share=SHARE):
    return ablation.outcome(replace(bench(), model=shared.base.seen.model), shared, Case("net", name, 0, share))


def options_of(method):
    """All that a method is: its fields and its switches."""
    return {name: getattr(method, name) for name in (*SWITCHES, *(part.name for part in fields(method)))}


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.switches or variant.fields])
def test_switched_methods_give_what_prune_gives_with_them(second_round, name):
    model, method = second_round.base.seen.model, VARIANTS[name].method(recoup.Best())
    found = made(second_round, name, 0.6)
    whole = recoup.prune(model, many_images(), budget=Budget(macs=1 - 0.6), method=method)
    assert found.output_error == min(whole.report.held_out.values())
    assert found.removed == whole.report.macs_removed
    assert found.kl == recoup.divergence(whole.model, model, bench().splits["test"])


def test_a_variant_switches_one_thing_and_keeps_the_seed():
    default = options_of(recoup.Best(seed=5))
    for variant in VARIANTS.values():
        method = variant.method(recoup.Best(seed=5))
        assert options_of(method) == {**default, **variant.switches, **variant.fields}
        assert set(variant.switches) <= set(SWITCHES) and type(method).__name__ == "Best"


def test_a_second_round_finds_other_widths(second_round):
    base = second_round.base
    once = base.with_method(VARIANTS["one round"].method(base.method))
    assert not torch.equal(ablation.allocate(base, 0.6), ablation.allocate(once, 0.6))


def test_widths_are_those_of_the_public_step(second_round):
    base, goal = second_round.base, recoup.Goal(budget=Budget(macs=1 - 0.6))
    fresh = base.with_method(base.method).seen
    assert torch.equal(ablation.allocate(base, 0.6), recoup.allocate(fresh, base.rankings, goal).keep)


def test_every_variant_is_a_row(base):
    shared = Shared(base)
    found = {name: made(shared, name) for name in VARIANTS}
    assert all(outcome.removed >= SHARE for outcome in found.values())
    assert {name for name, outcome in found.items() if outcome.output_error is None} == {"batch norm"}
    assert found["best"].stages["rank"] == found["no joint refits"].stages["rank"] == base.seconds["rank"]
    assert found["forward selection"].stages["rank"] != base.seconds["rank"]
    assert "measure" not in found["uniform widths"].stages
    uniform = removed(base.seen, ablation.allocate_uniformly(base, SHARE))
    assert found["uniform widths"].removed == uniform != found["best"].removed


@pytest.fixture
def asked(monkeypatch):
    """The stages that are run after measuring, in order, each with the method it is run with."""
    runs, allocate, recover = [], ablation.allocate, recoup.recover

    def noted_allocate(mine, share):
        runs.append(("allocate", options_of(mine.method)))
        return allocate(mine, share)

    def noted_recover(seen, keep):
        runs.append(("recover", options_of(seen.method)))
        return recover(seen, keep)

    monkeypatch.setattr(ablation, "allocate", noted_allocate)
    monkeypatch.setattr(recoup, "recover", noted_recover)
    return runs


def test_what_variants_have_in_common_is_run_once_and_counted_in_every_row(base, asked):
    shared, best = Shared(base), options_of(base.method)
    first, second, third = (made(shared, name).stages for name in ("no joint refits", "batch norm", "best"))
    assert asked == [("allocate", best), ("recover", {**best, "joint_steps": 0}), ("recover", best)]
    assert first["allocate"] == second["allocate"] == third["allocate"]
    assert first["recover"] != second["recover"] == third["recover"]


def test_every_share_has_widths_of_its_own(base, asked):
    shared = Shared(base)
    assert made(shared, "best", 0.2).removed < SHARE <= made(shared, "best").removed
    assert [stage for stage, _ in asked] == ["allocate", "recover"] * 2


@pytest.mark.parametrize("name", ["one round", "recovery once", "ridge fixed at 1e-4"])
def test_what_no_variant_asks_for_is_not_run(base, asked, name):
    made(Shared(base), name)
    own = {**options_of(base.method), **VARIANTS[name].switches}
    assert asked == [("allocate", own), ("recover", own)]


def test_uniform_widths_are_the_same_share_of_every_group(base):
    keep = ablation.allocate_uniformly(base, SHARE)
    kept = [int(keep[group.channels].sum()) / group.width for group in base.seen.structure.prunable]
    assert max(kept) - min(kept) <= 0.2  # groups of 8 and 10 channels


def test_only_what_is_fitted_to_is_mirrored():
    split = recoup.split(bench().model, images(0))
    twice = mirrored(split)
    (place,), (held,) = split.fit, split.held
    (before,), (after,) = split.batches[place].args, twice.batches[place].args
    assert torch.equal(after, torch.cat([before, before.flip(-1)]))
    assert twice.batches[held] is split.batches[held]


def test_plain_images_are_those_held_out_as_they_are(base):
    reference = ablation.plain_reference(base)
    split = base.seen.split
    expected = [base.seen.model(*split.batches[place].args) for place in split.held]
    for (found,), outputs in zip(reference._expected, expected, strict=True):
        torch.testing.assert_close(found, outputs)


def test_half_the_images_are_every_other_one_held_out(base, residual):
    halved = ablation.measuring_reference(base, VARIANTS["error on half the images"])
    expected = torch.cat([outputs for (outputs,) in reference_of(base.seen)._expected])[::2]
    torch.testing.assert_close(torch.cat([outputs for (outputs,) in halved._expected]), expected)
    assert ablation.measuring_reference(base, VARIANTS["error at one width"]) is reference_of(base.seen)
    curves, other = (
        varied(residual.base, VARIANTS[name]).allocator.curves for name in ("best", "error on half the images")
    )
    assert any(not torch.equal(curve.errors, other[name].errors) for name, curve in curves.items())


def test_arguments(monkeypatch, capsys):
    for name in ("RECOUP_CIFAR10", "RECOUP_IMAGENET"):
        monkeypatch.delenv(name, raising=False)
    options = ablation.parse(["--imagenet", "images", "--networks", "lite0", "--variants", "best", "--seeds", "2"])
    assert ablation.cases("lite0", options) == [Case("lite0", "best", seed, 0.25) for seed in (0, 1)]
    with pytest.raises(SystemExit):
        ablation.parse(["--cifar", "images"])
    assert "--checkpoints, --imagenet must be said for vgg16, resnet56, lite0" in capsys.readouterr().err


def row(name, seconds, device):
    made = Outcome(
        removed=0.25, validation_drop=1.0, kl=0.1, validation_kl=0.05, output_error=0.2, seconds=seconds, device=device
    )
    return Row(Case("net", name, 0, 0.25), made).plain()


def test_table_is_in_the_order_of_the_variants():
    rows = [row("uniform widths", 3, "a GPU"), row("best", 2, "a GPU")]
    assert ablation.table(rows).splitlines()[2:] == [
        "| net | 25.0% | best | 1.00 | - | 0.0500 | 0.1000 | 0.2000 | 2.0 s |",
        "| net | 25.0% | uniform widths | 1.00 | - | 0.0500 | 0.1000 | 0.2000 | 3.0 s |",
    ]


def test_times_of_a_cpu_are_relative():
    rows = [row("best", 2, "CPU"), row("uniform widths", 3, "CPU")]
    assert [text.split(" | ")[-1] for text in ablation.table(rows).splitlines()[2:]] == [
        "1.00 of best's |",
        "1.50 of best's |",
    ]
    assert ablation.table(rows[1:]).endswith("| - |")
    assert ablation.table([row("best", 2, "a GPU"), rows[1]]).endswith("| - |")
