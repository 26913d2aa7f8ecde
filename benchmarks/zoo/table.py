"""The page on architectures: per suite a count of what became of its networks, then every network."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from benchmarks.zoo.rows import ROUNDING, OurRow, Row, TheirRow
from benchmarks.zoo.store import Rows

RIGHT = "smaller, and computes what it should"
OTHER = "smaller, but computes something else"
UNCOMPARED = "smaller, could not be compared"
VERDICTS = (
    RIGHT,
    OTHER,
    UNCOMPARED,
    "smaller, but its outputs have other shapes",
    "smaller, but its forward pass crashes",
    "nothing removed, or less than 1 % of the MACs",
    "refused, with the reason",
    "crashed",
    "out of time",
)
BY_RESULT = {
    "shapes changed": VERDICTS[3],
    "forward crashes": VERDICTS[4],
    "untouched": VERDICTS[5],
    "refused": VERDICTS[6],
    "crash": VERDICTS[7],
    "time-out": VERDICTS[8],
}
WIDEST = 110  # characters of a reason
UNTOUCHED = 0.99  # share of MACs kept from which on nothing was gained
AGREES = 0.01  # of torch's count of MACs, ours may differ by so much
SHOWN = 0.005  # share of MACs below which a reason is left out


def rewrite(page: str, text: str) -> str:
    """`page` with `text` between its two markers."""
    pattern = re.compile(r"(<!-- zoo -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def render(found: Mapping[str, Rows]) -> str:
    """Every suite that has rows, as Markdown."""
    return "\n\n".join(_suite(suite, rows) for suite, rows in found.items() if rows)


def verdict(row: Row) -> str:
    """What became of a network, in words."""
    if row.result != "pruned":
        return BY_RESULT[row.result]
    if row.kept is not None and row.kept > UNTOUCHED:
        return BY_RESULT["untouched"]
    if isinstance(row, OurRow):
        return RIGHT if row.same_shapes else VERDICTS[3]
    if row.difference is None:
        return UNCOMPARED
    return RIGHT if row.difference <= ROUNDING else OTHER


def _suite(suite: str, rows: Rows) -> str:
    ours = {name: row for name, sides in rows.items() if isinstance(row := sides.get("ours"), OurRow)}
    theirs = {name: row for name, sides in rows.items() if isinstance(row := sides.get("theirs"), TheirRow)}
    lines = [f"### {suite}: {len(rows)} networks", "", *_summary(ours.values(), theirs.values()), ""]
    lines += [
        *_reasons(ours.values()),
        "| network, by a magnitude cut and its proof | GMACs | Recoup | kept | least | locked, and by what | proof |",
    ]
    lines[-1] += " seconds: export, trace, all | Torch-Pruning | kept | difference |"
    lines.append("|---" * 11 + "|")
    lines += [f"| {name} | {_ours(ours.get(name))} | {_theirs(theirs.get(name))} |" for name in rows]
    return "\n".join(lines)


def _summary(ours: Iterable[OurRow], theirs: Iterable[TheirRow]) -> list[str]:
    mine, other = list(ours), list(theirs)
    counts = [Counter(verdict(row) for row in rows) for rows in (mine, other)]
    lines = [
        f"| magnitude cut and its proof, not the default method | Recoup: {len(mine)} | Torch-Pruning: {len(other)} |",
        "|---|---|---|",
    ]
    lines += [
        f"| {text} | {counts[0][text]} | {counts[1][text]} |" for text in VERDICTS if (counts[0] + counts[1])[text]
    ]
    right = [row for row in mine if verdict(row) == RIGHT]
    lines.append(f"| of the first line: can lose half of its MACs | {sum(r.goal == 'half' for r in right)} | |")
    lines.append(f"| of the first line: not in the network's own class | {sum(r.form != 'class' for r in right)} | |")
    told = [(row.said, row.macs) for row in mine if row.said is not None and row.macs]
    if told:
        agree = sum(abs(said - counted) <= AGREES * counted for said, counted in told)
        lines.append(
            f"| Recoup's MACs of the whole network are within 1 % of torch's count | {agree} of {len(told)} | |"
        )
    lines.append(f"| of the first line: share of MACs kept, median | {_median(mine)} | {_median(other)} |")
    return lines


def _median(rows: Iterable[Row]) -> str:
    kept = [row.kept for row in rows if row.kept is not None and verdict(row) == RIGHT]
    return f"{statistics.median(kept):.0%}" if kept else "-"


def _reasons(rows: Iterable[OurRow]) -> list[str]:
    """Why networks were refused or crashed, the most frequent first."""
    whys = Counter(_short(row.why) for row in rows if row.why)
    lines = [f"- {why} ({count})" for why, count in whys.most_common()]
    return ["Refused or failed:", "", *lines, ""] if lines else []


def _ours(row: OurRow | None) -> str:
    if row is None:
        return " | ".join(["-"] * 7)
    result = row.result if row.form == "class" else f"{row.result}, as a {row.form}"
    proof = "-" if row.difference is None else f"{row.difference:.0e}"
    seconds = ", ".join(f"{row.seconds[stage]:.0f}" for stage in ("export", "trace", "total") if stage in row.seconds)
    reasons = [f"{_share(r.share)} {_short(r.text)}" for r in row.reasons if r.share >= SHOWN]
    locked = "; ".join([_share(row.locked), *reasons])
    cells = [_macs(row.macs), result, _share(row.kept), _share(row.least), locked, proof, seconds or "-"]
    return " | ".join(cells)


def _theirs(row: TheirRow | None) -> str:
    if row is None:
        return " | ".join(["-"] * 3)
    why = f": {_short(row.why)}" if row.why else ""
    difference = "-" if row.difference is None else f"{row.difference:.0e}"
    return f"{row.result}{why} | {_share(row.kept)} | {difference}"


def _short(text: str) -> str:
    line = text.replace("|", "/").replace("\n", " ")
    return line if len(line) <= WIDEST else f"{line[:WIDEST]}..."


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _macs(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e9:.3g}"
