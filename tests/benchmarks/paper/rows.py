"""Rows as the experiments store them, made by hand."""

from benchmarks.paper.cases import Case, Outcome, Row, Stamp

STAMP = Stamp({"recoup": "1.0", "torch": "2.11"}, "NVIDIA H200", "python -m benchmarks.paper table2 --cifar DIR")
STAGES = {"trace": 0.5, "statistics": 1.0, "selection": 2.0, "search": 3.0, "finish": 0.5}


def row(case: Case, *, stamp: Stamp = STAMP, **outcome: object) -> Row:
    """A row; what is not said of the outcome is that of a search."""
    usual = {
        "removed": 50.0, "top1": 93.0, "base": 94.0, "validation_drop": 0.4, "test_drop": 1.0, "kl": 0.05,
        "evaluations": 36, "stages": STAGES, "sparsity": {"a": 0.5, "b": 0.25},
    }  # fmt: skip
    return Row(case, Outcome(**{**usual, **outcome}), stamp)


def failed(case: Case, note: str) -> Row:
    """A row that came to nothing."""
    return Row(case, Outcome(note=note), STAMP)
