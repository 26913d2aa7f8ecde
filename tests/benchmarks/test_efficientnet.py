from argparse import Namespace

from benchmarks.efficientnet import Row, arguments, row_of, table

from recoup.cli.prune import prune_command

OPTIONS = Namespace(images="images", samples=8, validation_images=None, batch=4, device="cpu")


def test_the_command_line_takes_the_arguments():
    command, *words = arguments(0.7, "fast", OPTIONS)
    context = prune_command.make_context(command, [*words, "-o", "smaller"])
    given = context.params
    assert (
        given["macs"] == 0.7
        and given["method"] == "fast"
        and given["calibration_images"] == 8
        and given["validation_images"] is None
    )
    assert given["model"].endswith("lite0.py:build") and given["shape"] == "3,224,224" and given["as_json"]


def test_measuring_is_not_part_of_the_seconds():
    report = {"seconds": {"trace": 1.0, "select": 2.0, "measure": 9.0}, "macs_removed": 0.25, "score": {"after": 70.0}}
    assert row_of(report, 0.8, "best") == Row("recoup best", 0.8, 0.75, 70.0, 3.0)


def test_a_budget_of_the_papers_method_is_called_what_it_is():
    report = {"seconds": {"trace": 1.0}, "macs_removed": 0.25, "score": {"after": 70.0}}
    assert row_of(report, 0.8, "paper").method == "uniform widths, one pass"


def test_table_goes_from_the_largest_share_down():
    rows = [
        {"method": method, "share": share, "macs": share - 0.001, "top1": 60.0, "seconds": 1.25}
        for share in (0.6, 0.8)
        for method in ("recoup", "L2")
    ]
    lines = table({"base": 73.8, "rows": rows}).splitlines()
    assert lines[0] == "| MACs kept | method | reached | top-1 (original: 73.80) | points lost | seconds |"
    assert lines[2] == "| 80% | recoup | 79.9% | 60.00 | 13.80 | 1.2 |"
    assert [line.split(" | ")[1] for line in lines[2:]] == ["recoup", "L2", "recoup", "L2"]
