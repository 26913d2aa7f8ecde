"""Tables, figures and blocks of the page, from a few stored rows."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
from benchmarks.paper.cases import Case, in_order, key_of, read_row
from benchmarks.paper.experiment import block, publish
from benchmarks.paper.registry import EXPERIMENTS

from benchmarks.paper import drawing, fig4, fig5, fig6, retraining, table2, table3, table4, table5, weighting
from tests.benchmarks.paper.rows import STAMP, failed, row

VGG = Case("vgg16", tolerance=0.5)
LOSSES = {"a": [0.01 * step for step in range(1, 10)], "b": [0.02 * step for step in range(1, 10)]}


def rows_of(name):
    """A few rows that suit an experiment."""
    made = {
        "fig4": [Case("vgg16", tolerance=1.0, constraint=each) for each in ("step", "global")],
        "fig5": [Case("vgg16", seed=s, tolerance=1.0, selector=each) for each in ("forward", "random") for s in (0, 1)],
        "fig6": [Case("vgg16", selector=each) for each in ("forward", "l2")],
        "fig7": [Case("vgg16", tolerance=2.0, order=each) for each in ("bottom-up", "top-down")],
        "table3": [Case("vgg16", tolerance=2.0, data=each) for each in ("own:20000", "own:80", "noise:2000")],
        "table4": [VGG, Case("vgg16", "retraining", kept=0.5, epochs=1)],
        "table5": [Case("vgg16", tolerance=each, order="random") for each in (0.5, 1.0)],
        "weighting": [Case("vgg16", tolerance=1.0, weighting=each) for each in ("none", "slope", "outputs")],
        "retraining": [
            Case("vgg16", method, kept=0.4, selector=selector, recovery=recovery, epochs=epochs)
            for method, selector, recovery in (("uniform", "forward", "one-pass"), ("torch-pruning", "", "none"))
            for epochs in (0, 10)
        ],
    }
    return [row(case, losses=LOSSES) for case in made.get(name, [VGG])]


def test_paper_ours_and_the_difference_stand_side_by_side():
    rows = [row(VGG, removed=46.0, test_drop=0.6), row(replace(VGG, seed=1), removed=44.0, test_drop=0.6)]
    rows.append(failed(replace(VGG, tolerance=9.0), "too | few\nimages"))
    lines = table2.EXPERIMENT.table(rows).splitlines()
    assert lines[0] == (
        "| network | method | tolerance | FLOPs removed, %: paper | ours | difference | test drop: paper | ours | "
        "difference | validation drop | KL | evaluations | seconds |"
    )
    assert lines[1] == "|---" * 13 + "|"
    assert lines[2] == (
        "| vgg16 | paper | 0.5 | 43.23 | 45.00 ± 1.41 | +1.77 | 0.45 | 0.60 ± 0.00 | +0.15 | 0.40 ± 0.00 | "
        "0.050 ± 0.000 | 36 ± 0 | 7.0 ± 0.0 |"
    )
    assert lines[3].startswith("| vgg16 | paper | 9.0 | - | too / few images | - | - | too / few images | - |")
    assert lines[4] == "| as published | GAL, retrained | - | 39.60 | - | - | 0.19 | - | - | - | - | - | - |"
    assert {line.count("|") for line in lines} == {14}


def test_the_papers_count_of_flops_is_shown_where_there_is_one():
    assert "| 43.23 | 47.00 | +3.77 |" in table2.EXPERIMENT.table([row(VGG, removed=46.0, flops_removed=47.0)])


def test_limited_data_is_compared_with_the_same_share():
    lines = table3.table(rows_of("table3")).splitlines()
    assert lines[2].startswith("| vgg16 | paper | own images | 20,000 | 49.50 | 50.00 | +0.50 |")
    assert lines[3].startswith("| vgg16 | paper | own images | 80 | - | 50.00 | - |")
    assert lines[4].startswith("| vgg16 | paper | noise | 2,000 | 20.78 | 50.00 | +29.22 |")


def test_seconds_stand_by_stage_beside_retraining_and_the_paper():
    trained = row(
        Case("vgg16", "retraining", kept=0.5, epochs=10), stages={"training": 9.0}, memory={"training": 2 * 10**9}
    )
    lines = table4.table([row(VGG), trained]).splitlines()
    assert lines[2] == "| vgg16 | paper | 0.5 | 1.0 | 2.0 | 3.0 | 0.5 | - | 7.0 | - | 1.00 |"
    assert lines[3] == "| vgg16 | 10 epochs of retraining | - | - | - | - | - | 9.0 | 9.0 | 2.0 | 1.00 |"
    assert lines[4] == "| vgg16 | paper, as published | - | 256 | 274 | 191 | - | - | 720 | - | - |"


def test_other_tables_have_their_figures():
    assert "| vgg16 | random | 0.5 | 16.48 | 50.00 | +33.52 | 0.40 | 1.00 |" in table5.table(rows_of("table5"))
    assert "| vgg16 | step constraint | 1.0 | 50.0 | 0.40 | 1.00 | 50 25 |" in fig4.EXPERIMENT.table(rows_of("fig4"))
    assert "| vgg16 | forward | 50.0 ± 0.0 (1.00 ± 0.00) |" in fig5.table(rows_of("fig5"))
    assert "| vgg16 | forward | 0.0450 | 0.0750 | 0.1050 |" in fig6.table(rows_of("fig6"))
    shown = weighting.table(rows_of("weighting"))
    assert "| vgg16 | one per output | 1.0 | 50.0 | 0.40 | 1.00 | 0.050 | 1.0 | 2.0 | 3.0 |" in shown


def test_selectors_are_compared_at_equal_flops():
    at = [Case("vgg16", tolerance=tolerance, selector="l2") for tolerance in (1.0, 2.0)]
    rows = [row(at[0], removed=40.0, test_drop=1.0), row(at[1], removed=50.0, test_drop=2.0)]
    assert "| vgg16 | l2 | - | 1.00 | 1.50 | 2.00 | - | - |" in fig5.table_of_shares(rows)
    assert fig5.between([(1.0, 3.0), (1.0, 4.0)], 1.0) == 4.0 and fig5.between([], 1.0) is None


def test_selectors_and_recoveries_make_a_grid():
    start = Case("vgg16", "uniform", kept=0.4, recovery="none", epochs=1)
    cases = [replace(start, selector=s, recovery=r) for s in ("l1", "l2") for r in ("none", "one-pass")]
    rows = [row(case, top1=90.0 + place) for place, case in enumerate(cases)]
    assert retraining.table_of_grid(rows).splitlines() == [
        "| vgg16, 40% of the MACs, 1 epochs: top-1 | none | one-pass |", "|---|---|---|",
        "| l1 | 90.00 | 91.00 |", "| l2 | 92.00 | 93.00 |",
    ]  # fmt: skip


def test_seconds_of_a_shared_machine_are_not_compared():
    case = Case("vgg16", "best", kept=0.4, epochs=0)
    crowded = [row(case, stamp=replace(STAMP, shared=4))]
    assert "(7.0 s)" in retraining.table([row(case)]) and "s)" not in retraining.table(crowded)
    assert "| Recoup |" not in retraining.table(crowded)
    both = retraining.table([row(case), row(replace(case, seed=1), stamp=crowded[0].stamp, stages={"search": 99.0})])
    assert "(7.0 s)" in both


def test_retraining_is_told_by_epochs_and_by_what_is_done_in_time():
    slow = {"training": 100.0}
    rows = [
        row(replace(r.case), top1=90.0 + (r.case.epochs or 0) / 10, stages=slow if r.case.epochs else {"search": 5.0})
        for r in rows_of("retraining")
    ]
    text = retraining.table(rows)
    assert "| vgg16 (94.00) | 40% | forward, one-pass | 90.00 (5.0 s) | 91.00 (100.0 s) |" in text
    assert "| vgg16, 40% | Torch-Pruning | 90.00 (Torch-Pruning, 0) | 90.00 (Torch-Pruning, 0) |" in text
    assert "| vgg16, 40% | Torch-Pruning + fine-tuning | - | - | 91.00 (Torch-Pruning, 10) |" in text


def test_controls_are_told_apart_from_fine_tuning():
    start = Case("vgg16", "uniform", kept=0.4, selector="l2", recovery="none", epochs=10)
    rows = [row(start), *(row(replace(start, method=each), top1=80.0) for each in ("rewound", "scratch"))]
    text = retraining.table(rows)
    assert "| l2, learning rate rewound | 80.00 (" in text and "| l2, from scratch | 80.00 (" in text
    assert "| vgg16, 40% | from scratch | 80.00 (l2, from scratch, 10) |" in text
    rows += [row(replace(start, recovery="one-pass")), row(replace(start, method="best", selector="", recovery=""))]
    assert {name: len(mine) for name, mine in retraining.families(rows).items()} == {
        "L2 norm + fine-tuning": 1, "learning rate rewound": 1, "from scratch": 1, "Recoup + fine-tuning": 1,
    }  # fmt: skip


def test_networks_of_other_sizes_are_not_mixed():
    cases = [Case("vgg16", "best", kept=kept, epochs=0) for kept in (0.4, 0.6)]
    text = retraining.table([row(case, top1=top1) for case, top1 in zip(cases, (90.0, 92.0), strict=True)])
    assert "| vgg16, 40% | Recoup | 90.00 (Best, 0) |" in text and "| vgg16, 60% | Recoup | 92.00 (Best, 0) |" in text


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_fills_its_block_with_a_figure_that_is_the_same_again(name, tmp_path):
    page = tmp_path / "paper.md"
    page.write_text(f"above\n<!-- {name} -->\n<!-- end -->\nbelow\n")
    drawn = []
    for _ in range(2):
        publish(EXPERIMENTS[name], rows_of(name), tmp_path)
        drawn.append((tmp_path / "paper" / f"{name}.svg").read_text())
    assert drawn[0] == drawn[1] and "<dc:date>" not in drawn[0]
    assert drawing.INK in drawn[0] and "#000000" not in drawn[0]
    text = page.read_text()
    assert text.startswith(f"above\n<!-- {name} -->\n![") and text.endswith("```\n<!-- end -->\nbelow\n")
    assert f"](paper/{name}.svg)" in text
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_a_block_says_what_its_rows_were_made_with():
    long = replace(STAMP, command="python -m benchmarks.paper table2 " + " ".join(["--option value"] * 12))
    text = block(table2.EXPERIMENT, [row(VGG), row(replace(VGG, seed=1), stamp=replace(long, evaluate="bfloat16"))])
    assert "Seeds 0, 1. recoup 1.0, torch 2.11. NVIDIA H200. The search measured in float32 or bfloat16." in text
    assert "```\npython -m benchmarks.paper table2 --cifar DIR\npython -m benchmarks.paper table2 --option" in text
    assert " \\\n    " in text and "shared" not in text
    crowded = block(table2.EXPERIMENT, [row(VGG, stamp=replace(STAMP, shared=5)), row(replace(VGG, seed=1))])
    assert "Up to 5 processes shared the machine" in " ".join(crowded.split())


def test_a_row_survives_the_file_and_the_order_of_processes_does_not_matter():
    rows = [row(replace(VGG, seed=seed, tolerance=t), memory={"search": 3}) for t in (1.0, 0.5) for seed in (1, 0)]
    assert [read_row(each.plain()) for each in rows] == rows
    assert key_of(rows[0].plain()) == rows[0].case and rows[0].plain()["seed"] == 1
    assert [(r.case.tolerance, r.case.seed) for r in in_order(rows)] == [(0.5, 0), (0.5, 1), (1.0, 0), (1.0, 1)]
