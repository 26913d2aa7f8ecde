"""Ingredients switched one by one: each variant is what `prune` makes with that switch, at its own price."""

from dataclasses import replace

import pytest
import torch
from benchmarks.ablation import VARIANTS, Shared, mirrored
from benchmarks.rows import Case, Outcome, Row
from benchmarks.stages import Prepared, prepare

import recoup
from benchmarks import ablation
from recoup.judging.sample import sample_of
from recoup.search import rounds
from recoup.settings import Budget, find_preset
from recoup.variants import Recoverer
from tests import zoo
from tests.benchmarks.test_best import bench, images

SHARE = 0.4


@pytest.fixture(scope="module")
def base():
    return prepare(bench().model, images(0), find_preset("best"))


@pytest.fixture(scope="module")
def residual():
    with zoo.seeded(3):
        model = zoo.Residual(12).eval()
    return Shared(prepare(model, many_images(), find_preset("best")))


@pytest.fixture
def second_round(residual, monkeypatch):
    """What is shared in a network whose second round finds other widths, unless recovery is in one pass."""
    monkeypatch.setattr(rounds, "WORTHWHILE", 0.99)
    return residual


def many_images():
    return [batch for seed in range(6) for batch in images(seed)]


def made(shared, name, share=SHARE):
    return ablation.outcome(replace(bench(), model=shared.base.model), shared, Case("net", name, 0, share))


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.changes])
def test_switched_settings_give_what_prune_gives_with_them(second_round, name):
    model, settings = second_round.base.model, replace(find_preset("best"), **VARIANTS[name].changes)
    found = made(second_round, name, 0.6)
    whole = recoup.prune(model, many_images(), budget=Budget(macs=1 - 0.6), preset=settings)
    assert found.harm == min(whole.report.held_out.values())
    assert found.removed == whole.report.macs_removed
    assert found.kl == recoup.divergence(whole.model, model, bench().splits["test"])


def test_a_second_round_finds_other_widths(second_round):
    base = second_round.base
    assert not torch.equal(base.keep(0.6), base.with_settings(rounds=1).keep(0.6))


def test_every_variant_is_a_row(base):
    shared = Shared(base)
    found = {name: made(shared, name) for name in VARIANTS}
    assert all(outcome.removed >= SHARE for outcome in found.values())
    assert {name for name, outcome in found.items() if outcome.harm is None} == {"batch norm"}
    assert found["best"].stages["select"] == found["no joint refits"].stages["select"] == base.seconds["select"]
    assert found["forward selection"].stages["select"] != base.seconds["select"]
    assert "allocate" not in found["uniform widths"].stages
    assert found["uniform widths"].removed == base.removed(ablation.uniform(base, SHARE)) != found["best"].removed


@pytest.fixture
def asked(monkeypatch):
    """The stages that are run after allocation, in order, each with the settings it is run with."""
    runs, keep, plan = [], Prepared.keep, Recoverer.plan

    def noted_keep(self, share):
        runs.append(("widths", self.seen.settings))
        return keep(self, share)

    def noted_plan(self, mask, *rest, quick=False):
        if not quick:
            runs.append(("recover", self._calibration.settings))
        return plan(self, mask, *rest, quick=quick)

    monkeypatch.setattr(Prepared, "keep", noted_keep)
    monkeypatch.setattr(Recoverer, "plan", noted_plan)
    return runs


def test_what_variants_have_in_common_is_run_once_and_counted_in_every_row(base, asked):
    shared, preset = Shared(base), base.seen.settings
    first, second, third = (made(shared, name).stages for name in ("no joint refits", "batch norm", "best"))
    assert asked == [("widths", preset), ("recover", replace(preset, joint=0)), ("recover", preset)]
    assert first["widths"] == second["widths"] == third["widths"]
    assert first["recover"] != second["recover"] == third["recover"]


def test_every_share_has_widths_of_its_own(base, asked):
    shared = Shared(base)
    assert made(shared, "best", 0.2).removed < SHARE <= made(shared, "best").removed
    assert [stage for stage, _ in asked] == ["widths", "recover"] * 2


@pytest.mark.parametrize("name", ["one round", "recovery once", "ridge fixed at 1e-4"])
def test_what_no_variant_asks_for_is_not_run(base, asked, name):
    made(Shared(base), name)
    own = replace(base.seen.settings, **VARIANTS[name].changes)
    assert asked == [("widths", own), ("recover", own)]


def test_uniform_widths_are_the_same_share_of_every_group(base):
    keep = ablation.uniform(base, SHARE)
    kept = [int(keep[group.channels].sum()) / group.width for group in base.seen.structure.prunable]
    assert max(kept) - min(kept) <= 0.2  # groups of 8 and 10 channels


def test_only_what_is_fitted_to_is_mirrored():
    sample = sample_of(bench().model, images(0))
    twice = mirrored(sample)
    (place,), (held,) = sample.seen, sample.held
    (before,), (after,) = sample.batches[place].args, twice.batches[place].args
    assert torch.equal(after, torch.cat([before, before.flip(-1)]))
    assert twice.batches[held] is sample.batches[held]


def test_plain_images_are_those_held_out_as_they_are(base):
    reference = ablation.plain_reference(base)
    expected = [base.model(*base.sample.batches[place].args) for place in base.sample.held]
    for (found,), outputs in zip(reference._expected, expected, strict=True):
        torch.testing.assert_close(found, outputs)


def test_half_the_images_are_every_other_one_held_out(base, residual):
    halved = ablation.reference_of(base, VARIANTS["harm on half the images"])
    expected = torch.cat([outputs for (outputs,) in base.reference._expected])[::2]
    torch.testing.assert_close(torch.cat([outputs for (outputs,) in halved._expected]), expected)
    assert ablation.reference_of(base, VARIANTS["harm at one width"]) is base.reference
    curves, other = (
        ablation.varied(residual.base, VARIANTS[name]).allocation.harms for name in ("best", "harm on half the images")
    )
    assert any(not torch.equal(harm.curve, other[name].curve) for name, harm in curves.items())


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
        removed=0.25, validation_drop=1.0, kl=0.1, validation_kl=0.05, harm=0.2, seconds=seconds, device=device
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
