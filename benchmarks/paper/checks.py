"""What the rows of an experiment must mean; where they do not, the command fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.paper.cases import Case, Row, average, measured

# Points by which float32 and a lower precision may see another drop on the same images.
OTHER_PRECISION = 0.3


def require(holds: bool, message: str) -> None:
    """Raise an AssertionError that says what does not hold; unlike `assert`, also under python -O."""
    if not holds:
        raise AssertionError(message)


def require_rows(rows: Iterable[Row], cases: Sequence[Case]) -> None:
    """Every case has a row that came to something."""
    known = {row.case: row.outcome.note for row in rows}
    for case in cases:
        require(case in known, f"{case} has no row")
        require(not known[case], f"{case}: {known[case]}")


def require_within_tolerance(rows: Iterable[Row]) -> None:
    """No search lost more on the validation images than it was allowed to, and each counted its measurements."""
    for row in measured(rows):
        tolerance, drop = row.case.tolerance, row.outcome.validation_drop
        assert tolerance is not None and drop is not None
        slack = 0.0 if row.stamp.evaluate == "float32" else OTHER_PRECISION
        require(drop < tolerance + slack, f"{row.case} lost {drop:.2f} points on the validation images")
        require((row.outcome.evaluations or 0) > 0, f"{row.case} measured nothing")


def require_more_for_more(rows: Sequence[Row], **fields: object) -> None:
    """The largest tolerance removes more than the smallest one."""
    mine = measured(rows, **fields)
    tolerances = sorted({row.case.tolerance for row in mine if row.case.tolerance is not None})
    if len(tolerances) < 2:
        return
    least, most = (
        average([row for row in mine if row.case.tolerance == tolerance], "flops")
        for tolerance in (tolerances[0], tolerances[-1])
    )
    require(
        most > least,
        f"{fields}: {most:.1f} % go at tolerance {tolerances[-1]}, no more than {least:.1f} % at {tolerances[0]}",
    )
