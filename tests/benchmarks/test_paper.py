"""The paper's protocol: a row is what `prune` makes with the paper's method and that tolerance."""

import pytest
from benchmarks.paper import method_of, one_sample, parse, seconds_of, table

import recoup
from tests.benchmarks.test_best import bench, images

WORDS = ["--cifar", "images", "--weights", "weights"]


@pytest.mark.parametrize("method", [recoup.Paper(seed=2), recoup.Released(seed=2)])
def test_rows_are_what_prune_makes_within_the_tolerances(method):
    here = bench()
    rows = one_sample(here.model, images(0), dict(here.splits), method, (10.0, 30.0), keep_class=True)
    assert [(row["seed"], row["tolerance"]) for row in rows] == [(2, 10.0), (2, 30.0)]
    for row in rows:
        whole = recoup.prune(
            here.model,
            images(0),
            validation=here.splits["validation"],
            tolerance=row["tolerance"],
            method=method,
            keep_class=True,
        )
        assert row["macs_drop"] == pytest.approx(100 * whole.report.macs_removed)
        assert row["kl"] == recoup.divergence(whole.model, here.model, here.splits["test"])
        assert row["validation_drop"] < row["tolerance"]
    assert rows[0]["macs_drop"] < rows[1]["macs_drop"]
    assert seconds_of(rows[0]) < sum(rows[0]["seconds"].values())
    assert table(rows).splitlines()[2].startswith("| 10.0 | ")


def test_only_fields_of_the_method_can_be_set(capsys):
    options = parse([*WORDS, "--order", "top-down", "--positions", "0"])
    assert method_of(options, 3) == recoup.Paper(order="top-down", positions=None, seed=3)
    assert method_of(parse([*WORDS, "--method", "released"]), 1) == recoup.Released(seed=1)
    with pytest.raises(SystemExit):
        parse([*WORDS, "--method", "released", "--weighting", "slope"])
    assert "--weighting: no option of the method released" in capsys.readouterr().err
