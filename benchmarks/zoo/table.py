"""The page on architectures: for every suite a count of what became of its networks, below it every network."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from benchmarks.zoo.rows import CutRow, TheirRow
from benchmarks.zoo.store import Rows
from benchmarks.zoo.table_of_methods import rows_by_method, summary_by_method
from benchmarks.zoo.verdicts import RIGHT, VERDICTS, gigamacs, locks, power, share, short, verdict

AGREES = 0.01  # of torch's count of MACs, ours may differ by so much


def rewrite(page: str, text: str) -> str:
    """`page` with `text` between its two markers."""
    pattern = re.compile(r"(<!-- zoo -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def render(found: Mapping[str, Rows]) -> str:
    """Every suite that has rows, as Markdown: the summaries, then the networks."""
    suites = {suite: rows for suite, rows in found.items() if rows}
    counts = [f"### {suite}: {len(rows)} networks\n\n{_counts(rows)}" for suite, rows in suites.items()]
    networks = [f"### Every network of {suite}\n\n{_networks(rows)}" for suite, rows in suites.items()]
    return "\n\n".join([*counts, *networks])


def _counts(rows: Rows) -> str:
    ours, theirs = _of_magnitude(rows)
    mine = [*_summary(ours.values(), theirs.values()), *_reasons(ours.values())] if ours else []
    return "\n\n".join(part for part in ("\n".join(mine), summary_by_method(rows)) if part)


def _networks(rows: Rows) -> str:
    ours, theirs = _of_magnitude(rows)
    lines = [
        "| network, by a magnitude cut and its proof | GMACs | Recoup | kept | least | locked, and by what | proof |"
        " seconds: export, trace, all | Torch-Pruning | kept | difference |",
        "|---" * 11 + "|",
        *(f"| {name} | {_ours(ours.get(name))} | {_theirs(theirs.get(name))} |" for name in rows),
    ]
    mine = "\n".join(lines) if ours else ""
    return "\n\n".join(part for part in (mine, rows_by_method(rows)) if part)


def _of_magnitude(rows: Rows) -> tuple[dict[str, CutRow], dict[str, TheirRow]]:
    ours = {name: row for name, ways in rows.items() if isinstance(row := ways.get("magnitude"), CutRow)}
    theirs = {name: row for name, ways in rows.items() if isinstance(row := ways.get("torch-pruning"), TheirRow)}
    return ours, theirs


def _summary(ours: Iterable[CutRow], theirs: Iterable[TheirRow]) -> list[str]:
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


def _median(rows: Iterable[CutRow | TheirRow]) -> str:
    kept = [row.kept for row in rows if row.kept is not None and verdict(row) == RIGHT]
    return f"{statistics.median(kept):.0%}" if kept else "-"


def _reasons(rows: Iterable[CutRow]) -> list[str]:
    """Why networks were refused or crashed, the most frequent first."""
    whys = Counter(short(row.why) for row in rows if row.why)
    lines = [f"- {why} ({count})" for why, count in whys.most_common()]
    return ["", "Refused or failed:", "", *lines] if lines else []


def _ours(row: CutRow | None) -> str:
    if row is None:
        return " | ".join(["-"] * 7)
    result = row.result if row.form == "class" else f"{row.result}, as a {row.form}"
    seconds = ", ".join(f"{row.seconds[stage]:.0f}" for stage in ("export", "trace", "total") if stage in row.seconds)
    locked = locks(row.locked, row.reasons)
    cells = [
        gigamacs(row.macs),
        result,
        share(row.kept),
        share(row.least),
        locked,
        power(row.difference),
        seconds or "-",
    ]
    return " | ".join(cells)


def _theirs(row: TheirRow | None) -> str:
    if row is None:
        return " | ".join(["-"] * 3)
    why = f": {short(row.why)}" if row.why else ""
    return f"{row.result}{why} | {share(row.kept)} | {power(row.difference)}"
