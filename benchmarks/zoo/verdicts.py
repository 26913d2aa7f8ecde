"""What became of a network, in words, and how figures are written in a table."""

from __future__ import annotations

from benchmarks.zoo.rows import ROUNDING, CopiesRow, Reason, Row, TheirRow

RIGHT = "smaller, and computes what it should"
OTHER = "smaller, but computes something else"
UNCOMPARED = "smaller, could not be compared"
SHAPES = "smaller, but its outputs have other shapes"
UNTOUCHED = "nothing removed, or less than 1 % of the MACs"
BY_RESULT = {
    "shapes changed": SHAPES,
    "forward crashes": "smaller, but its forward pass crashes",
    "untouched": UNTOUCHED,
    "kept": "nothing is lost",
    "lost": "something is lost",
    "no copies": "no copies could be made",
    "refused": "refused, with the reason",
    "crash": "crashed",
    "time-out": "out of time",
}
VERDICTS = (RIGHT, OTHER, UNCOMPARED, *BY_RESULT.values())
WHOLE = 0.99  # share of MACs kept from which on nothing was gained
WIDEST = 110  # characters of a reason
SHOWN = 0.005  # share of MACs below which a reason is left out


def verdict(row: Row) -> str:
    """What became of a network, in words."""
    if isinstance(row, CopiesRow) or row.result != "pruned":
        return BY_RESULT[row.result]
    if row.kept is not None and row.kept > WHOLE:
        return UNTOUCHED
    if not isinstance(row, TheirRow):
        return RIGHT if row.same_shapes else SHAPES
    if row.difference is None:
        return UNCOMPARED
    return RIGHT if row.difference <= ROUNDING else OTHER


def short(text: str, widest: int = WIDEST) -> str:
    """A reason, fit for a table."""
    line = text.replace("|", "/").replace("\n", " ")
    return line if len(line) <= widest else f"{line[:widest]}..."


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{value:.0%}"


def gigamacs(value: int | None) -> str:
    """Multiply-accumulates in milliards."""
    return "-" if value is None else f"{value / 1e9:.3g}"


def power(value: float | None) -> str:
    """An error by its power of ten."""
    return "-" if value is None else f"{value:.0e}"


def locks(locked: float | None, reasons: tuple[Reason, ...]) -> str:
    """The share that is locked, and by what."""
    return "; ".join([share(locked), *(f"{share(r.share)} {short(r.text)}" for r in reasons if r.share >= SHOWN)])
