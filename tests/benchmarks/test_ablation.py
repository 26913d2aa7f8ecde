"""Ingredients switched one by one: each variant is what `prune` makes with that switch, at its own price."""

from dataclasses import replace

import pytest
import torch
from benchmarks.ablation import VARIANTS, mirrored, varied
from benchmarks.rows import Case, Outcome, Row
from benchmarks.stages import prepare

import recoup
from benchmarks import ablation
from recoup.judging.sample import sample_of
from recoup.settings import Budget, find_preset
from tests.benchmarks.test_best import bench, images

SHARE = 0.4


@pytest.fixture(scope="module")
def base():
    return prepare(bench().model, images(0), find_preset("best"))


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.changes])
def test_switched_settings_give_what_prune_gives_with_them(base, name):
    settings = replace(find_preset("best"), **VARIANTS[name].changes)
    prepared = varied(base, VARIANTS[name])
    chosen = prepared.recoverer().plan(prepared.keep(SHARE))
    whole = recoup.prune(base.model, images(0), budget=Budget(macs=1 - SHARE), preset=settings)
    assert chosen.harms == whole.report.held_out
    for group, mask in whole.plan.keep.items():
        assert torch.equal(chosen.plan.keep[group], mask)


def test_every_variant_is_a_row(base):
    here = replace(bench(), model=base.model)
    found = {name: ablation.outcome(here, base, Case("net", name, 0, SHARE)) for name in VARIANTS}
    assert all(outcome.removed >= SHARE for outcome in found.values())
    assert {name for name, outcome in found.items() if outcome.harm is None} == {"batch norm"}
    assert found["best"].stages["select"] == found["no joint refits"].stages["select"] == base.seconds["select"]
    assert found["forward selection"].stages["select"] != base.seconds["select"]
    assert "allocate" not in found["uniform widths"].stages


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


def test_arguments(monkeypatch, capsys):
    for name in ("RECOUP_CIFAR10", "RECOUP_IMAGENET"):
        monkeypatch.delenv(name, raising=False)
    options = ablation.parse(["--imagenet", "images", "--networks", "lite0", "--variants", "best", "--seeds", "2"])
    assert ablation.cases("lite0", options) == [Case("lite0", "best", seed, 0.25) for seed in (0, 1)]
    with pytest.raises(SystemExit):
        ablation.parse(["--cifar", "images"])
    assert "--checkpoints, --imagenet must be said for vgg16, resnet56, lite0" in capsys.readouterr().err


def row(name, seconds, device):
    made = Outcome(removed=0.25, validation_drop=1.0, kl=0.1, harm=0.2, seconds=seconds, device=device)
    return Row(Case("net", name, 0, 0.25), made).plain()


def test_table_is_in_the_order_of_the_variants():
    rows = [row("uniform widths", 3, "a GPU"), row("best", 2, "a GPU")]
    assert ablation.table(rows).splitlines()[2:] == [
        "| net | 25.0% | best | 1.00 | - | 0.1000 | 0.2000 | 2.0 s |",
        "| net | 25.0% | uniform widths | 1.00 | - | 0.1000 | 0.2000 | 3.0 s |",
    ]


def test_times_of_a_cpu_are_relative():
    rows = [row("best", 2, "CPU"), row("uniform widths", 3, "CPU")]
    assert [text.split(" | ")[-1] for text in ablation.table(rows).splitlines()[2:]] == [
        "1.00 of best's |",
        "1.50 of best's |",
    ]
    assert ablation.table(rows[1:]).endswith("| - |")
