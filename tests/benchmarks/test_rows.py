"""Rows on disk: kept as they come, and not made twice."""

import json

import pytest
from benchmarks.rows import Case, Outcome, Row, Store, alike, case_of, mean, mean_and_values

from recoup.errors import UsageError

CASES = [Case("net", method, seed, 0.5) for seed in (0, 1) for method in ("best", "fast")]


def test_a_second_store_goes_on_where_the_first_stopped(tmp_path):
    path = tmp_path / "new" / "rows.json"
    first = Store(path, {"images": 10})
    assert first.waiting(CASES) == CASES
    first.add(Row(CASES[1], Outcome(test_drop=1.5, stages={"select": 2.0})))
    second = Store(path, {"images": 10})
    assert second.waiting(CASES) == [CASES[0], *CASES[2:]]
    assert second.rows == first.rows == [Row(CASES[1], Outcome(test_drop=1.5, stages={"select": 2.0})).plain()]


def test_a_row_takes_the_place_of_an_older_one_and_is_printed(tmp_path, capsys):
    store = Store(tmp_path / "rows.json", {})
    for drop in (1.0, 2.0):
        store.add(Row(CASES[0], Outcome(test_drop=drop)))
    assert [row["test_drop"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [2.0]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_rows_of_other_settings_are_not_mixed(tmp_path):
    path = tmp_path / "rows.json"
    Store(path, {"images": 10}).add(Row(CASES[0], Outcome()))
    with pytest.raises(UsageError, match=r"made with \{'images': 10\}, not with \{'images': 20\}"):
        Store(path, {"images": 20})


def test_a_case_survives_the_file():
    for case in (*CASES, Case("net", "tolerance", 3, tolerance=1.0)):
        assert case_of(json.loads(json.dumps(Row(case, Outcome()).plain()))) == case


def test_means_leave_out_what_is_missing():
    rows = [{"seed": seed, "kl": kl} for seed, kl in ((1, 0.3), (0, 0.1), (2, None))]
    assert mean(rows, "kl", ".3f") == "0.200"
    assert mean_and_values(rows, "kl") == "0.20 (0.10 / 0.30)"
    assert mean_and_values(rows[2:], "kl") == "-"


def test_rows_are_grouped_in_the_order_they_come():
    rows = [{"a": a, "b": b} for a, b in ((2, 1), (1, 1), (2, 2))]
    assert alike(rows, "a") == [[rows[0], rows[2]], [rows[1]]]
