"""The report as one HTML file that needs nothing else: no script, no font, no picture from outside."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from recoup.report.charts import is_clipped, search_chart, width_chart
from recoup.report.content import GroupRow, Report, Score
from recoup.report.numbers import duration, short
from recoup.search import Latency
from recoup.version import __version__


def render_page(report: Report) -> str:
    """A self-contained HTML page: headline figures, pictures and tables."""
    title = escape(f"{report.network}, pruned")
    sections = (
        _header(report),
        _cards(report),
        _widths(report),
        _search(report.score),
        _held_out(report),
        _recovery(report),
        _locked(report.groups),
        _seconds(report),
        _settings(report),
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    loss = "" if report.score is None else f"; {_points(report.score.drop)}"
    summary = (
        f"{report.macs_removed:.1%} of the multiply-accumulates and {report.parameters_removed:.1%} of the parameters "
        f"are gone{loss}. Calibrated on {report.samples:,} samples, not retrained."
    )
    warnings = "".join(f"<p><strong>Note:</strong> {escape(text)}</p>" for text in report.warnings)
    return (
        f'<header><p class="eyebrow">Recoup {escape(__version__)} &middot; pruning report</p>'
        f"<h1>{escape(report.network)}</h1><p>{escape(summary)}</p>{warnings}</header>\n"
    )


def _points(drop: float) -> str:
    return (
        "the score is unchanged"
        if drop == 0
        else f"the score {'lost' if drop > 0 else 'gained'} {abs(drop):.2f} points"
    )


def _cards(report: Report) -> str:
    before, after = report.before, report.after
    cards = [
        _cost_card("MACs", before.macs, after.macs, report.macs_removed),
        _cost_card("Parameters", before.parameters, after.parameters, report.parameters_removed),
    ]
    if report.latency is not None:
        cards.append(_latency_card(report.latency))
    if report.score is not None:
        cards.append(_score_card(report.score))
    cards.append(_proof_card(report))
    return f'<div class="cards">{"".join(cards)}</div>\n'


def _cost_card(what: str, before: int, after: int, removed: float) -> str:
    return _card(
        what,
        f"&minus;{removed:.1%}",
        f"{short(before)} &rarr; {short(after)}",
        f'<span class="exact">{before:,} &rarr; {after:,}</span>{_meter(1 - removed)}',
    )


def _latency_card(latency: Latency) -> str:
    change = f"{latency.share - 1:+.1%}".replace("-", "&minus;")
    times = f"{duration(latency.before)} &rarr; {duration(latency.after)}"
    note = f'<span class="exact">at most {latency.asked:.1%} asked for</span>{_meter(latency.share)}'
    return _card("Time of a batch", change, times, note)


def _score_card(score: Score) -> str:
    tolerance = "measured, no tolerance asked for" if score.tolerance is None else f"tolerance {score.tolerance:.2f}"
    meter = "" if score.tolerance is None else _meter(max(0.0, score.drop) / score.tolerance)
    change = "&plusmn;0" if score.drop == 0 else f"{-score.drop:+.2f}".replace("-", "&minus;")
    note = f'<span class="exact">{tolerance}</span>{meter}'
    return _card(
        score.what.capitalize(), f"{change}<small> points</small>", f"{score.before:.2f} &rarr; {score.after:.2f}", note
    )


def _proof_card(report: Report) -> str:
    proof = report.proof
    value = "exact" if proof.difference == 0 else f"{proof.difference:.0e}"
    allowed = f", {proof.allowed:.0e} allowed" if proof.allowed else ""
    equality = "smaller = masked original" + ("" if proof.difference == 0 else f" to {value}")
    note = f"largest relative difference on a random batch{allowed}"
    form = "" if report.form is None else f'<span class="exact">standalone graph: {escape(report.form)}</span>'
    return _card("Proof", value, equality, f'<span class="exact">{note}</span>{form}')


def _card(label: str, value: str, detail: str, note: str) -> str:
    return (
        f'<section class="card"><h2>{label}</h2><p class="figure">{value}</p><p class="detail">{detail}</p>{note}'
        "</section>"
    )


def _meter(share: float) -> str:
    width = 100 * min(1.0, max(0.0, share))
    return f'<span class="meter"><span style="width:{width:.1f}%"></span></span>'


def _widths(report: Report) -> str:
    if not report.groups:
        return ""
    legend = _legend(("kept", "kept"), ("gone", "gone"), ("locked", "locked, has to stay"))
    rows = (
        (
            f"<code>{escape(group.name)}</code>",
            f"{group.before} &rarr; {group.after}",
            _meter(group.after / max(1, group.before)),
            escape(", ".join(group.consumers)) or "&ndash;",
        )
        for group in report.groups
    )
    note = "Channels that can only go together form a group, named after the first layer that makes it."
    table = _table(("Group", "Channels", "Kept", "Read by"), rows)
    return _section("Widths", note, legend + width_chart(report.groups) + table)


def _search(score: Score | None) -> str:
    if score is None or not score.trials:
        return ""
    accepted = sum(trial.accepted for trial in score.trials)
    keys = (("accepted", "accepted"), ("rejected", "rejected"), ("allowed", "allowed"))
    legend = _legend(*keys, *((("beyond", "rejected, beyond the picture"),) if is_clipped(score.trials) else ()))
    note = (
        f"Points lost in every trial, or with a confidence the most that may have been: {len(score.trials)} candidates "
        f"were measured, {accepted} were accepted."
    )
    return _section("Search", note, legend + search_chart(score.trials))


def _held_out(report: Report) -> str:
    if not report.held_out:
        return ""
    least, most = min(report.held_out.values()), max(report.held_out.values())
    rows = (
        (escape(name) + (" (kept)" if harm == least else ""), f"{harm:.4f}", _meter(harm / most if most else 0.0))
        for name, harm in report.held_out.items()
    )
    note = (
        "What each way to recover the layers does to the outputs, on calibration images that no fit has seen: the "
        "divergence of class probabilities in nats, or the relative squared error. The least was kept."
    )
    return _section("Held-out images", note, _table(("Recovery", "Harm", ""), rows))


def _recovery(report: Report) -> str:
    if not report.recovery:
        return ""
    rows = (
        (
            f"<code>{escape(name)}</code>",
            f"{layer.residual:.2%}",
            _meter(layer.residual),
            f"{layer.ridge:.1e}",
            f"{layer.condition:.1e}",
            f"{layer.rows:,} / {layer.inputs:,}",
        )
        for name, layer in report.recovery.items()
    )
    note = (
        "Every layer that lost inputs was refitted in closed form. The residual is the expected squared error of its "
        "output relative to the output's variance; the ridge is what was added to the covariance; the condition is a "
        "lower bound for the system that was solved; the last column says from how many samples it was fitted on how "
        "many inputs."
    )
    return _section("Recovery", note, _table(("Layer", "Residual", "", "Ridge", "Condition", "Samples / inputs"), rows))


def _locked(groups: Iterable[GroupRow]) -> str:
    rows = [
        (
            f"<code>{escape(group.name)}</code>",
            f"{group.locked} of {group.before}",
            "<br>".join(escape(reason) for reason in group.reasons),
        )
        for group in groups
        if group.locked
    ]
    if not rows:
        return ""
    note = "Channels that have to stay, and why."
    return _section("Locked", note, _table(("Group", "Locked", "Reason"), rows))


def _seconds(report: Report) -> str:
    total = sum(report.seconds.values())
    if not total:
        return ""
    rows = ((escape(stage), f"{spent:.2f} s", _meter(spent / total)) for stage, spent in report.seconds.items())
    return _section("Time", f"{total:.1f} seconds in all.", _table(("Stage", "Seconds", "Share"), rows))


def _settings(report: Report) -> str:
    if not report.settings:
        return ""
    pairs = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in report.settings.items()
    )
    return _section("Settings", "As they were used.", f"<dl>{''.join(pairs)}</dl>")


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">{note}</p>{body}</section>\n'


def _legend(*entries: tuple[str, str]) -> str:
    items = (f'<span><i class="key {kind}"></i>{text}</span>' for kind, text in entries)
    return f'<p class="legend">{"".join(items)}</p>'


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --panel: #fff; --ink: #16202c; --soft: #5b6877; --line: #e1e6ec;
  --kept: #2563c9; --gone: #d5deea; --bad: #c2410c; --allowed: #64748b; --lock: #16305c; }
@media (prefers-color-scheme: dark) { :root { --ground: #10151c; --panel: #18202a; --ink: #e6ebf1; --soft: #98a6b5;
  --line: #2a3542; --kept: #6ea3f5; --gone: #2f3d4e; --bad: #fb923c; --allowed: #94a3b8; --lock: #1e3a68; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 20px 64px; }
header { margin-bottom: 28px; }
.eyebrow { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: .04em; }
h1 { margin: 2px 0 6px; font-size: 34px; line-height: 1.2; letter-spacing: -.01em; overflow-wrap: anywhere; }
header p:last-child { margin: 0; max-width: 70ch; color: var(--soft); font-size: 17px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; }
main > section, .card { background: var(--panel); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 16px 18px; }
.card h2 { margin: 0; color: var(--soft); font-size: 13px; font-weight: 600; }
.figure { margin: 2px 0 0; font-size: 30px; font-weight: 650; line-height: 1.25; letter-spacing: -.01em; }
.figure small { font-size: 16px; font-weight: 500; letter-spacing: 0; }
.detail { margin: 0; font-weight: 500; }
.exact { display: block; color: var(--soft); font-size: 13px; }
main > section { margin-top: 14px; padding: 20px 22px; }
main > section > h2 { margin: 0; font-size: 19px; }
.note { margin: 2px 0 14px; max-width: 82ch; color: var(--soft); font-size: 14px; }
.meter { display: block; height: 6px; margin-top: 8px; border-radius: 3px; background: var(--gone); overflow: hidden; }
.meter span { display: block; height: 100%; border-radius: 3px; background: var(--kept); }
td .meter { min-width: 90px; margin: 0; }
.figure, .detail, .exact, td { font-variant-numeric: tabular-nums; }
.table { max-height: 460px; overflow: auto; }
table { width: 100%; min-width: 540px; border-collapse: collapse; font-size: 14px; }
th { position: sticky; top: 0; background: var(--panel); color: var(--soft); font-size: 12px; font-weight: 600; }
th, td { padding: 7px 14px 7px 0; text-align: left; border-bottom: 1px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; }
td { overflow-wrap: break-word; }
td:nth-child(2) { white-space: nowrap; }
code { font: 13px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.chart { overflow-x: auto; margin-bottom: 10px; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 6px; color: var(--soft); font-size: 13px; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 3px; vertical-align: -1px; }
.key.kept { background: var(--kept); } .key.gone { background: var(--gone); }
.key.locked { background: repeating-linear-gradient(45deg, var(--lock) 0 2px, var(--kept) 2px 5px); }
.key.accepted, .key.rejected { border-radius: 50%; } .key.accepted { background: var(--kept); }
.key.rejected { border: 2px solid var(--bad); }
.key.beyond { border-radius: 0; background: var(--bad); clip-path: polygon(50% 0, 100% 100%, 0 100%); }
.key.allowed { height: 0; border-top: 2px dashed var(--allowed); border-radius: 0; vertical-align: 4px; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.tick { fill: var(--soft); font-size: 12px; } .value { fill: var(--ink); font-size: 12px; font-weight: 600; }
rect.gone { fill: var(--gone); } rect.kept { fill: var(--kept); } rect.locked { fill: url(#hatch); }
.hatch-ground { fill: var(--kept); } .hatch-line { fill: var(--lock); }
polyline.allowed { fill: none; stroke: var(--allowed); stroke-width: 2; stroke-dasharray: 5 4; }
circle.accepted { fill: var(--kept); } circle.rejected { fill: var(--panel); stroke: var(--bad); stroke-width: 2; }
polygon.rejected { fill: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 10px 20px; margin: 0; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font: 13px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
@media print { body { background: #fff; font-size: 12px; } main { max-width: none; padding: 0; }
  .table { max-height: none; overflow: visible; } main > section, .card { break-inside: auto; }
  .card, .chart, tr, dl { break-inside: avoid; } h2, .note { break-after: avoid; }
  .cards { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
