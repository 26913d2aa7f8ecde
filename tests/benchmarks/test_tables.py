"""The tables of docs/results.md: every file of rows is shown by the benchmark that made it."""

import json

import pytest
from benchmarks.rows import Case, Outcome, Row

pytest.importorskip("matplotlib")
from benchmarks.tables import replace_table, table

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
