"""Fixed shares of the MACs: the steps taken apart are those of `prune`, and rows become tables."""

from dataclasses import fields, replace

import pytest
import torch
from benchmarks.baselines import count_macs
from benchmarks.networks import Bench, measure_all, ranked, removed
from benchmarks.paper.published import PUBLISHED
from benchmarks.paper.searches import stored_searches
from benchmarks.rows import Case, Outcome, Row, Store, case_of

import recoup
from benchmarks import best, networks
from recoup import Budget
from recoup.errors import ModelError
from tests import zoo

PLACES = ["--cifar", "images", "--checkpoints", "weights"]


def images(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(30, 3, 8, 8, generator=generator) for _ in range(2)]
    return [(x, torch.randint(4, (30,), generator=generator)) for x in draw]


def bench() -> Bench:
    with zoo.seeded(0):
        model = zoo.plain(8).eval()
    splits = {"validation": images(100), "test": images(101)}
    base = {name: recoup.accuracy(model, batches) for name, batches in splits.items()}
    return Bench("net", model, images, splits, base, "CPU")


def options(*words: str):
    return best.parse([*PLACES, *words])


def plain_row(method: str, seed: int = 0, *, share=0.5, tolerance=None, **outcome):
    return Row(Case("net", method, seed, share, tolerance), Outcome(**outcome)).plain()


def test_the_steps_are_those_of_prune():
    here, method = bench(), recoup.Best(seed=3)
    before, goal = ranked(here.model, images(0), method), recoup.Goal(budget=Budget(macs=1 - 0.4))
    made = best.steps(before, method, goal)
    whole = recoup.prune(here.model, images(0), budget=Budget(macs=1 - 0.4), method=method)
    assert removed(made.seen, made.keep) == whole.report.macs_removed
    assert made.recovered.errors == whole.report.held_out
    for name, value in whole.plan.weights.items():
        torch.testing.assert_close(made.recovered.plan.weights[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["best", "fast"])
def test_a_row_is_what_the_method_makes(method):
    here, case = bench(), Case("net", method, 0, 0.4)
    (row,) = best.rows_in_steps(here, images(0), recoup.Best(), [case], options())
    whole = recoup.prune(here.model, images(0), budget=Budget(macs=1 - 0.4), method=method)
    assert row.outcome.output_error == min(whole.report.held_out.values())
    assert row.outcome.kl == recoup.divergence(whole.model, here.model, here.splits["test"])
    assert row.outcome.validation_kl == recoup.divergence(whole.model, here.model, here.splits["validation"])


def test_every_method_makes_its_rows(monkeypatch):
    monkeypatch.setattr(networks, "open_bench", lambda network, options: replace(bench(), network=network))
    monkeypatch.setattr(best, "prune_with_torch_pruning", lambda model, *_, **__: model)
    given = options("--networks", "resnet20", "--shares", "0.4", "--seeds", "2", "--refine", "0.1")
    waiting = best.cases("resnet20", given)
    store = Store(None, {})
    measure_all(store, given, best.cases, best.rows)
    rows = [Row(case_of(row), Outcome(**{part.name: row[part.name] for part in fields(Outcome)})) for row in store.rows]
    assert {row.case.method for row in rows} == {*best.METHODS, best.WITH_BATCH_NORM}
    assert {row.case for row in rows} == set(waiting) and len(rows) == len(waiting) == 9
    for row in rows:
        assert row.outcome.note == "" and row.outcome.seconds == sum(row.outcome.stages.values())
        assert "torch" in row.case.method or 0.4 <= row.outcome.removed < 0.6
    stages = {row.case.method: row.outcome.stages for row in rows if row.case.seed == 0}
    assert stages["best"]["rank"] == stages["fast"]["rank"]
    assert stages["refined"]["recover"] == stages["best"]["recover"] and "refine" in stages["refined"]


def test_what_is_out_of_reach_is_a_row():
    here = bench()
    given, waiting = options(), [Case("net", "best", 0, 0.999)]
    (row,) = best.rows_in_steps(here, images(0), recoup.Best(), waiting, given)
    assert row.outcome.top1 is None and "out of reach" in row.outcome.note
    assert "out of reach" in best.with_uniform_widths(here, images(0), Case("net", best.UNIFORM, 0, 0.999)).note


def test_a_crash_of_torch_pruning_is_a_row_but_its_absence_is_none(monkeypatch, capsys):
    case = Case("net", best.TORCH_PRUNING, 0, 0.5)

    def fail(error):
        def prune(*_, **__):
            raise error

        monkeypatch.setattr(best, "prune_with_torch_pruning", prune)
        return list(best.rows_of_torch_pruning(bench(), images(0), case, 0.5))

    rows = fail(RuntimeError("shapes"))
    assert [row.case.method for row in rows] == [best.TORCH_PRUNING, best.WITH_BATCH_NORM]
    assert [row.outcome for row in rows] == [Outcome(note="RuntimeError: shapes")] * 2
    assert fail(ModelError("not installed")) == []
    assert "skipped, not installed" in capsys.readouterr().err


def test_a_tolerance_gives_the_bound_it_was_accepted_with():
    here = bench()
    made = best.within_tolerance(here, images(0), recoup.Best(), Case("net", "tolerance", 0, tolerance=30.0))
    assert made.removed > 0 and made.validation_drop <= made.bound < 30.0
    assert made.seconds == made.stages["prune"]


def test_cases_of_the_first_sample_only():
    found = best.cases("resnet56", options("--seeds", "2", "--methods", "fast", best.UNIFORM, "torch-pruning"))
    assert [case.method for case in found if case.seed == 1] == ["fast"] * 3
    first = [case.method for case in found if case.seed == 0 and case.share == 0.3]
    assert first == ["fast", "uniform widths, one pass", "torch-pruning", "torch-pruning + batch norm"]


def test_a_tolerance_replaces_the_shares():
    found = best.cases("vgg16", options("--tolerance", "1.0", "--tolerance-seeds", "2"))
    assert found == [Case("vgg16", "tolerance", seed, None, 1.0) for seed in (0, 1)]


def test_what_is_done_opens_no_network(monkeypatch):
    monkeypatch.setattr(networks, "open_bench", lambda *_: pytest.fail("there is nothing to do"))
    given = options("--networks", "vgg16")
    store = Store(None, {})
    for case in best.cases("vgg16", given):
        store.add(Row(case, Outcome()))
    before = list(store.rows)
    measure_all(store, given, best.cases, best.rows)
    assert store.rows == before


def test_places_have_to_be_said(capsys, monkeypatch):
    monkeypatch.delenv("RECOUP_CIFAR10", raising=False)
    with pytest.raises(SystemExit):
        best.parse(["--networks", "vgg16"])
    assert "--checkpoints, --cifar must be said for vgg16" in capsys.readouterr().err


def test_table_has_means_values_and_notes():
    rows = [
        plain_row(best.UNIFORM, note="out of | reach"),
        plain_row("best", 1, top1=93.0, test_drop=1.0, kl=0.2, seconds=4.0),
        plain_row("best", 0, top1=93.5, test_drop=0.5, kl=0.1, seconds=2.0),
        plain_row("best", 0, share=0.3, top1=93.9, test_drop=0.1, kl=0.01, seconds=1.0),
    ]
    assert best.table(rows).splitlines() == [
        "| network (top-1) | MACs removed | method | test drop | KL | seconds |",
        "|---|---|---|---|---|---|",
        "| net (94.00) | 30% | best | 0.10 | 0.010 | 1.0 |",
        "| net (94.00) | 50% | best | 0.75 (0.50 / 1.00) | 0.150 | 3.0 |",
        "| net (94.00) | 50% | uniform widths, one pass | -, out of / reach | - | - |",
    ]


def test_the_published_figure_nearest_to_the_share_stands_beside_ours():
    rows = [{**plain_row("best", share=share), "network": "vgg16"} for share in (0.5, 0.7)]
    published = [line for line in best.table(rows).splitlines() if "published" in line]
    assert [line.split(" | ")[1:4] for line in published] == [
        ["50%", "paper, as published", "0.80 for 50.9 %"],
        ["70%", "paper, as published", "2.09 for 65.6 %"],
    ]
    assert all(line.endswith("| 720 (its authors' GPU, 40,000 images) |") for line in published)


def test_published_figures_are_losses_on_test_images_and_no_tolerances():
    assert [figure.test_drop for figure in PUBLISHED] == [0.45, 0.80, 1.30, 1.72, 2.09]
    assert [round(figure.removed, 1) for figure in PUBLISHED] == [43.2, 50.9, 56.8, 59.7, 65.6]
    assert all(figure.test_drop < figure.tolerance for figure in PUBLISHED)


def test_our_run_of_the_papers_search_stands_at_what_it_removed():
    seconds = {"trace": 9.0, "calibrate": 4.0, "select": 3.0, "search": 2.0, "finish": 1.0}
    common = {"network": "net", "tolerance": 1.0, "kl": 0.05, "seconds": seconds}
    searches = [
        {**common, "seed": 0, "macs_drop": 50.0, "test_drop": 0.5},
        {**common, "seed": 1, "macs_drop": 53.0, "test_drop": 0.7},
        {**common, "seed": 0, "macs_drop": 70.0, "test_drop": 9.0, "network": "another"},
        {**common, "seed": 0, "macs_drop": 60.0, "test_drop": 1.5, "tolerance": 2.0, "device": "CPU", "images": 1000},
    ]
    rows = [plain_row("best", top1=93.5, test_drop=0.5, kl=0.1, seconds=2.0)]
    assert best.table(rows, searches).splitlines()[3:] == [
        "| net (94.00) | 51.5% | paper's search (our run), tolerance 1.0 | 0.60 (0.50 / 0.70) | 0.050 | "
        "10.0 (NVIDIA H200, 20,000 images) |",
        "| net (94.00) | 60.0% | paper's search (our run), tolerance 2.0 | 1.50 | 0.050 | 10.0 (CPU, 1,000 images) |",
    ]


def test_stored_searches_know_their_networks(tmp_path):
    (tmp_path / "resnet20_cifar10_paper.json").write_text('[{"tolerance": 1.0}]')
    assert stored_searches(["vgg16", "resnet20"], tmp_path) == [{"network": "resnet20", "tolerance": 1.0}]


def test_tolerances_have_a_table_of_their_own():
    common = {"share": None, "tolerance": 1.0, "validation_drop": 0.6, "top1": 93.0, "seconds": 9.0}
    rows = [
        plain_row("tolerance", seed, removed=removed, test_drop=drop, bound=bound, **common)
        for seed, removed, drop, bound in ((0, 0.5, 0.8, 0.9), (1, 0.6, 1.2, None))
    ]
    text = best.table(rows)
    assert text.splitlines()[2].startswith(
        "| net (93.80) | 1.0 | 2 | 55.0% (50.0% to 60.0%) | 0.60 (0.60) | 0.90 (0.90)"
    )
    assert text.endswith("| 1.00 (1.20) | 1 | 9.0 |")
    assert len(best.table([*rows, plain_row("best")]).split("\n\n")) == 2


def test_the_classifier_is_the_last_linear_layer():
    here = bench()
    assert here.classifier == "2"
    assert count_macs(here.model, here.example) == recoup.inspect(here.model, here.example).cost.macs
