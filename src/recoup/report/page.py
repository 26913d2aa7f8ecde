"""The report as one HTML file that needs nothing else: no script, no font, no picture from outside.

This module computes what the page shows; `templates/report.html` writes the HTML.
"""

from __future__ import annotations

from dataclasses import dataclass

from recoup.allocation.latency import Latency
from recoup.report.charts import search_chart, width_chart
from recoup.report.content import Report, Score
from recoup.report.formatting import duration, short
from recoup.report.templates import render
from recoup.version import __version__

_MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Card:
    """A headline figure; `share` is the filled part of its bar, None for no bar."""

    label: str
    value: str
    detail: str
    notes: tuple[str, ...]
    share: float | None = None
    unit: str = ""


def render_page(report: Report) -> str:
    """A self-contained HTML page: headline figures, charts and tables."""
    trials = () if report.score is None else report.score.trials
    return render(
        "report.html",
        version=__version__,
        network=report.network,
        summary=_summary(report),
        warnings=report.warnings,
        cards=_cards(report),
        groups=report.groups,
        constant=report.constant,
        constancy=report.constancy,
        dependence=report.dependence,
        widths=width_chart(report.groups) if report.groups else None,
        search=search_chart(trials) if trials else None,
        held_out=report.held_out,
        recovery=report.recovery,
        locked=[group for group in report.groups if group.locked],
        finetuned=report.finetuned,
        seconds=report.seconds,
        memory=report.memory,
        method=report.method,
    )


def _summary(report: Report) -> str:
    after = "not retrained" if report.retraining is None else f"then {report.retraining}"
    loss = "" if report.score is None else f"; {_points(report.score.drop)}"
    return (
        f"{report.macs_removed:.1%} of the multiply-accumulates and {report.parameters_removed:.1%} of the parameters "
        f"are gone{loss}. Calibrated on {report.samples:,} samples, {after}."
    )


def _points(drop: float) -> str:
    if drop == 0:
        return "the score is unchanged"
    return f"the score {'lost' if drop > 0 else 'gained'} {abs(drop):.2f} points"


def _cards(report: Report) -> list[Card]:
    before, after = report.before, report.after
    cards = [
        _cost_card("MACs", before.macs, after.macs, report.macs_removed),
        _cost_card("FLOPs", before.flops, after.flops, report.flops_removed),
        _cost_card("Parameters", before.parameters, after.parameters, report.parameters_removed),
    ]
    if report.latency is not None:
        cards.append(_latency_card(report.latency))
    if report.score is not None:
        cards.append(_score_card(report.score))
    return [*cards, _proof_card(report)]


def _cost_card(label: str, before: int, after: int, removed: float) -> Card:
    exact = f"{before:,} → {after:,}"
    return Card(label, f"{_MINUS}{removed:.1%}", f"{short(before)} → {short(after)}", (exact,), 1 - removed)


def _latency_card(latency: Latency) -> Card:
    times = f"{duration(latency.before)} → {duration(latency.after)}"
    asked = f"at most {latency.asked:.1%} asked for"
    return Card("Time of a batch", _signed(f"{latency.share - 1:+.1%}"), times, (asked,), latency.share)


def _score_card(score: Score) -> Card:
    change = "±0" if score.drop == 0 else _signed(f"{-score.drop:+.2f}")
    points = f"{score.before:.2f} → {score.after:.2f}"
    tolerance, share = "measured, no tolerance asked for", None
    if score.tolerance is not None:
        tolerance, share = f"tolerance {score.tolerance:.2f}", score.drop / score.tolerance
    notes = [tolerance]
    if score.top5_before is not None and score.top5_after is not None:
        notes.append(f"top-5 {score.top5_before:.2f} → {score.top5_after:.2f}")
    return Card(score.what.capitalize(), change, points, tuple(notes), share, unit="points")


def _proof_card(report: Report) -> Card:
    proof = report.proof
    value = "exact" if proof.difference == 0 else f"{proof.difference:.0e}"
    equality = "smaller = masked original" + ("" if proof.difference == 0 else f" to {value}")
    allowed = f", {proof.allowed:.0e} allowed" if proof.allowed else ""
    notes = [f"largest relative difference on a random batch{allowed}"]
    if report.form is not None:
        notes.append(f"standalone graph: {report.form}")
    notes += report.notes
    if report.held_by_class is not None:
        notes.append(report.held_by_class)
    return Card("Proof", value, equality, tuple(notes))


def _signed(number: str) -> str:
    """A number with the sign that lines up with a plus."""
    return number.replace("-", _MINUS)
