"""The tables of docs/results.md: every file of rows is shown by the benchmark that made it."""

import json

import pytest
from benchmarks.rows import Case, Outcome, Row

pytest.importorskip("matplotlib")
from benchmarks.paper.published import PUBLISHED, TOLERANCES
from benchmarks.tables import (
    RESULTS,
    draw_losses,
    points_at_shares,
    published_points,
    replace_table,
    table,
    with_tables,
)

ROW = Row(Case("net", "best", 0, 0.5), Outcome(removed=0.5, top1=90.0, test_drop=1.0, kl=0.1, seconds=2.0)).plain()


@pytest.mark.parametrize(
    ("name", "column"), [("best", "method"), ("tolerance", "method"), ("ablation", "variant"), ("held_out", "variant")]
)
def test_rows_become_the_table_between_the_markers(tmp_path, name, column):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"settings": {}, "rows": [ROW]}))
    page = replace_table(f"above\n<!-- {name} -->\nold\n<!-- end -->\nbelow", name, table(path))
    assert f"| MACs removed | {column} |" in page and "old" not in page
    assert page.startswith(f"above\n<!-- {name} -->\n| network") and page.endswith("|\n<!-- end -->\nbelow")


class Axes:
    """Keeps what is drawn, by label."""

    def __init__(self):
        self.drawn = {}

    def plot(self, x, y, *_, label, **__):
        self.drawn[label] = list(zip(x, y, strict=True))

    def scatter(self, x, y, *, label, **__):
        self.drawn[label] = list(zip(x, y, strict=True))

    def set(self, **_): ...

    def legend(self, **_): ...


def test_the_picture_has_what_the_paper_lost_on_test_images_not_what_it_was_allowed_to_lose():
    axes = Axes()
    draw_losses(axes, [], [{"macs_drop": 53.0, "test_drop": 1.1}])
    published = axes.drawn["paper, as published"]
    assert published == [(43.23, 0.45), (50.90, 0.80), (56.77, 1.30), (59.72, 1.72), (65.61, 2.09)]
    assert [lost for _, lost in published] != list(TOLERANCES)
    assert axes.drawn["paper's search (our run)"] == [(53.0, 1.1)]
    assert published_points(PUBLISHED[:1]).lost == [0.45]


def test_points_at_shares_are_means_over_samples():
    rows = [{**ROW, "share": share, "test_drop": drop} for share, drop in ((0.7, 3.0), (0.5, 1.0), (0.5, 2.0))]
    found = points_at_shares([*rows, {**ROW, "method": "fast"}], "net", "best")
    assert (found.removed, found.lost) == ([50.0, 70.0], [1.5, 3.0])


def test_the_papers_table_names_both_machines_and_numbers_of_images():
    header, _, first, *_ = table(RESULTS / "vgg16_cifar10_paper.json").splitlines()
    assert "(NVIDIA H200, 20,000 images; paper: 720 on its authors' GPU, 40,000 images)" in header
    assert first.startswith("| 0.5 | 43.23 | 0.45 | 46.2 (")
    assert "paper" not in table(RESULTS / "resnet20_cifar10_paper.json")


def test_every_stored_file_has_its_table():
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    page = with_tables("\n".join(f"<!-- {name} -->\n<!-- end -->" for name in names))
    assert page.count("|---|") >= len(names) and "harm" not in page
    assert "| uniform widths, one pass |" in page and "| paper's search (our run), tolerance 1.0 |" in page
    assert "| paper |" not in page and "recoup paper" not in page
