"""What the methods make of a suite: how many networks are done, who was refused and why, then every network."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from benchmarks.zoo.pruned import AGREES
from benchmarks.zoo.rows import FALLBACK, LONGEST, WAYS, CopiesRow, CutRow, PrunedRow, Setting, TheirRow, Way
from benchmarks.zoo.store import Rows
from benchmarks.zoo.verdicts import RIGHT, VERDICTS, gigamacs, locks, power, share, short, verdict

# The class of a model in a message about it, without which one reason is the same for many.
CLASS = re.compile(r"\b[A-Z]\w+(?= (cannot be captured|can be pruned))")

# Lines of the page are no longer than this, where they are no table.
WIDTH = 118

MethodRow = PrunedRow | CopiesRow | TheirRow
ByWay = dict[Way, dict[str, MethodRow]]


def summary_by_method(rows: Rows) -> str:
    """Settings, how many networks are done, and what went wrong; empty where no method was tried."""
    given = _given(rows)
    return "\n".join([*_settings(given), "", *_summary(given), *_failures(given)]) if given else ""


def rows_by_method(rows: Rows) -> str:
    """A line for every network; empty where no method was tried."""
    given = _given(rows)
    return "\n".join(_every(rows, given)) if given else ""


def _given(rows: Rows) -> ByWay:
    """The rows of every method; the other library's as well, where it does not stand beside a magnitude cut."""
    is_cut = any(isinstance(row, CutRow) for ways in rows.values() for row in ways.values())
    found = {way: _of_way(rows, way) for way in WAYS}
    of_methods = {way for way, mine in found.items() if any(not isinstance(row, TheirRow) for row in mine.values())}
    shown = {way: mine for way, mine in found.items() if mine and (way in of_methods or not is_cut)}
    return dict(sorted(shown.items(), key=lambda item: item[0] not in of_methods)) if of_methods else {}


def _of_way(rows: Rows, way: Way) -> dict[str, MethodRow]:
    return {name: row for name, ways in rows.items() if isinstance(row := ways.get(way), MethodRow)}


def _settings(given: ByWay) -> list[str]:
    """A line for each way: the numbers of samples, the sizes and the machines of its rows."""
    settings = {
        way: [row.setting for row in mine.values() if not isinstance(row, TheirRow)] for way, mine in given.items()
    }
    said = {way: _setting(mine) for way, mine in settings.items() if mine}
    return [
        textwrap.fill(f"- `{way}` on random inputs: {setting}.", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for way, setting in said.items()
    ]


def _setting(settings: Iterable[Setting | None]) -> str:
    known = [setting for setting in settings if setting is not None]
    sizes = [setting.size for setting in known if setting.size is not None]
    machines = "; ".join(sorted({setting.machine for setting in known}))
    side = f", images of side {_range(sizes)}" if sizes else ""
    return f"{_range([setting.samples for setting in known])} samples{side}; {machines}"


def _range(values: list[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _summary(given: ByWay) -> list[str]:
    verdicts = {way: Counter(verdict(row) for row in mine.values()) for way, mine in given.items()}
    lines = [
        _line("", {way: f"`{way}`: {len(mine)}" for way, mine in given.items()}, given),
        "|---" * (len(given) + 1) + "|",
    ]
    lines += [
        _line(text, {way: str(counts[text]) for way, counts in verdicts.items()}, given)
        for text in VERDICTS
        if any(counts[text] for counts in verdicts.values())
    ]
    right = {way: [r for r in _pruned(mine) if verdict(r) == RIGHT] for way, mine in given.items()}
    figures: dict[str, Callable[[list[PrunedRow]], str]] = {
        "of the first line: half of the MACs, not half way to the least": _count(lambda row: row.goal == "half"),
        "of the first line: in the network's own class": _count(lambda row: row.form == "class"),
        "of the first line: done by the paper's method in its place": _count(lambda row: row.fell_back),
        "of the first line: MACs within 1 % of torch's count, before and after": _count(lambda row: not row.counted),
        "of the first line: output error on held-out samples, median": lambda r: power(_median(row.error for row in r)),
        "of the first line: seconds, median": lambda r: f"{_median(row.seconds['total'] for row in r) or 0:.0f}",
        "of the first line: MiB at most, median": lambda r: f"{_median(row.memory for row in r) or 0:.0f}",
    }
    if any(right.values()):
        lines += [_line(what, {w: tell(r) for w, r in right.items() if r}, given) for what, tell in figures.items()]
    return lines


def _line(what: str, cells: Mapping[Way, str], given: ByWay) -> str:
    return f"| {' | '.join([what, *(cells.get(way, '') for way in given)])} |"


def _pruned(mine: Mapping[str, MethodRow]) -> list[PrunedRow]:
    return [row for row in mine.values() if isinstance(row, PrunedRow)]


def _count(holds: Callable[[PrunedRow], bool]) -> Callable[[list[PrunedRow]], str]:
    return lambda rows: str(sum(map(holds, rows)))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _failures(given: ByWay) -> list[str]:
    """Why networks were not done, with their names, and what other methods or counts there were."""
    lines = []
    for way, mine in given.items():
        whys: dict[str, list[str]] = {}
        for name, row in mine.items():
            for why in _complaints(row):
                whys.setdefault(why, []).append(name)
        lines += [f"| `{way}` | {why} | {', '.join(names)} |" for why, names in whys.items()]
    return ["", "| what is not as it should be | | networks |", "|---|---|---|", *lines] if lines else []


def _complaints(row: MethodRow) -> list[str]:
    if isinstance(row, TheirRow):
        return []  # the table of every network says it
    found = [f"{row.result}: {short(CLASS.sub('the model', row.why), LONGEST)}"] if row.why else []
    if isinstance(row, CopiesRow):
        return found if row.result != "lost" else [f"lost: {power(row.error)} of the spread of the outputs"]
    if row.fell_back:
        found.append(short(next(text for text in row.warned if text.startswith(FALLBACK)), LONGEST))
    if row.counted:
        found.append(_apart(row))
    return found


def _apart(row: PrunedRow) -> str:
    """How two counts of MACs differ."""
    after = None if row.kept is None or row.macs is None else round(row.kept * row.macs)
    pairs = [("before", row.said, row.macs), ("after", row.left, after)]
    told = [
        f"{said:,} MACs {when}, {counted:,} by torch"
        for when, said, counted in pairs
        if said is not None and counted is not None and abs(said - counted) > AGREES * counted
    ]
    return "; ".join(told)


def _every(rows: Rows, given: ByWay) -> list[str]:
    heads = [" | ".join([f"`{way}`", *_heads(way)]) for way in given]
    lines = [f"| network | GMACs | locked, and by what | {' | '.join(heads)} |"]
    lines.append("|---" * (3 + sum(1 + len(_heads(way)) for way in given)) + "|")
    for name in rows:
        mine = [found[name] for found in given.values() if name in found]
        if mine:
            known = next((row for row in mine if isinstance(row, PrunedRow) and row.locked is not None), None)
            first = ["-", "-"] if known is None else [gigamacs(known.macs), locks(known.locked, known.reasons)]
            cells = [_cells(found.get(name), way) for way, found in given.items()]
            lines.append(f"| {' | '.join([name, *first, *cells])} |")
    return lines


def _heads(way: Way) -> list[str]:
    """The columns beside the one of the result."""
    if way in ("fast", "best"):
        return ["kept", "error", "proof", "s, MiB"]
    return ["kept", "difference"] if way == "torch-pruning" else ["lost", "s, MiB"]


def _cells(row: MethodRow | None, way: Way) -> str:
    if row is None:
        return " | ".join(["-"] * (1 + len(_heads(way))))
    if isinstance(row, TheirRow):
        why = f": {short(row.why)}" if row.why else ""
        return f"{row.result}{why} | {share(row.kept)} | {power(row.difference)}"
    cost = f"{row.seconds['total']:.0f}, {row.memory or 0}" if "total" in row.seconds else "-"
    if isinstance(row, CopiesRow):
        seen = "" if row.inputs == "new" else ", on what was seen"
        return f"{row.result}{seen} | {power(row.error)} | {cost}"
    fell_back = ", by the paper's method" if row.fell_back else ""
    result = f"{row.result}{'' if row.form == 'class' else ', as a graph'}{fell_back}"
    return " | ".join([result, share(row.kept), power(row.error), power(row.difference), cost])
