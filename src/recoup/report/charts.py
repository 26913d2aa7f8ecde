"""The two pictures of the report as inline SVG: every group's width, and the course of the search.

They carry classes instead of colours; the page's style sheet paints them for light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from recoup.report.content import GroupRow
from recoup.search import Trial

WIDTH = 960
LEFT, RIGHT, TOP = 56, 12, 22
PLOT_HEIGHT = 200
# More columns than this leave no room for their names; the pointer still shows them.
MOST_LABELS = 24
# Up to this many columns are wide enough for the width before and after.
MOST_PAIRS = 12
LABEL_LENGTH = 16
WIDEST_COLUMN = 56
# Drops beyond this multiple of the largest allowance are drawn at the upper edge, so that the others stay apart.
CLIP = 2.0


@dataclass(frozen=True, slots=True)
class _Scale:
    """A vertical axis from `low` at the bottom of the plot to `high` at its top."""

    low: float
    high: float

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return TOP + PLOT_HEIGHT * (1 - min(1.0, max(0.0, share)))


def width_chart(groups: Sequence[GroupRow]) -> str:
    """One column per group, in the order of the network: what was, what is left, and what is locked."""
    scale = _Scale(0, max(group.before for group in groups) * 1.05)
    named = len(groups) <= MOST_LABELS
    columns = [_column(group, place, len(groups), scale) for place, group in enumerate(groups)]
    names = [_name(group, place, len(groups)) for place, group in enumerate(groups)] if named else []
    return _svg(TOP + PLOT_HEIGHT + (96 if named else 14), "Channels per group", [_grid(scale), *columns, *names])


def search_chart(trials: Sequence[Trial]) -> str:
    """Points lost in every trial against the points it was allowed to lose."""
    scale = _drop_scale(trials)
    points = [_point(trial, place, len(trials), scale) for place, trial in enumerate(trials)]
    body = [_grid(scale), _zero(scale), _allowance(trials, scale), *points, _trial_axis(len(trials))]
    return _svg(TOP + PLOT_HEIGHT + 44, "Points lost in every trial", body)


def is_clipped(trials: Sequence[Trial]) -> bool:
    """Whether a trial lost more than the picture of the search has room for."""
    high = _drop_scale(trials).high
    return any(trial.drop > high for trial in trials)


def _drop_scale(trials: Sequence[Trial]) -> _Scale:
    allowed = max(trial.allowed for trial in trials)
    drops = [trial.drop for trial in trials]
    high = max(allowed, min(max(drops), CLIP * allowed))
    return _Scale(min(0.0, *drops), high * 1.05)


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    return (
        f'<div class="chart"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{_HATCH}{''.join(body)}</svg></div>"
    )


def _grid(scale: _Scale) -> str:
    lines = (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(tick):.1f}" y2="{scale.y(tick):.1f}"></line>'
        f"{_text('tick', LEFT - 8, scale.y(tick) + 4, f'{tick:g}', 'end')}"
        for tick in _ticks(scale)
    )
    return "".join(lines)


def _ticks(scale: _Scale) -> list[float]:
    """Round numbers, about four of them."""
    rough = (scale.high - scale.low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    first, last = math.ceil(scale.low / step), math.floor(scale.high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _middle(place: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / count


def _column(group: GroupRow, place: int, count: int, scale: _Scale) -> str:
    wide = min(WIDEST_COLUMN, 0.72 * (WIDTH - LEFT - RIGHT) / count)
    x = _middle(place, count) - wide / 2
    parts = (("gone", group.before), ("kept", group.after), ("locked", min(group.locked, group.after)))
    bars = "".join(_bar(kind, x, wide, size, scale) for kind, size in parts if size)
    if count <= MOST_LABELS:
        value = f"{group.before} → {group.after}" if count <= MOST_PAIRS else str(group.after)
        bars += _text("value", x + wide / 2, scale.y(group.before) - 6, value)
    said = f"{group.name}: {group.before} -> {group.after} channels, {group.locked} locked"
    return f"<g><title>{escape(said)}</title>{bars}</g>"


def _bar(kind: str, x: float, wide: float, size: int, scale: _Scale) -> str:
    top = scale.y(size)
    return f'<rect class="{kind}" x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{scale.y(0) - top:.1f}"></rect>'


def _text(kind: str, x: float, y: float, content: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _name(group: GroupRow, place: int, count: int) -> str:
    x, y = _middle(place, count) + 4, TOP + PLOT_HEIGHT + 16
    return f'<g transform="rotate(-40 {x:.1f} {y})">{_text("tick", x, y, _shortened(group.name), "end")}</g>'


def _shortened(name: str) -> str:
    """The end of a dotted name tells siblings apart, so the front is what goes."""
    return name if len(name) <= LABEL_LENGTH else f"…{name[-LABEL_LENGTH + 1 :]}"


def _zero(scale: _Scale) -> str:
    y = f"{scale.y(0):.1f}"
    return f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"></line>'


def _allowance(trials: Sequence[Trial], scale: _Scale) -> str:
    """A staircase: every trial's own allowance, as wide as its slot."""
    half = (WIDTH - LEFT - RIGHT) / len(trials) / 2
    corners = []
    for place, trial in enumerate(trials):
        middle, y = _middle(place, len(trials)), scale.y(trial.allowed)
        corners += [f"{middle - half:.1f},{y:.1f}", f"{middle + half:.1f},{y:.1f}"]
    return f'<polyline class="allowed" points="{" ".join(corners)}"></polyline>'


def _point(trial: Trial, place: int, count: int, scale: _Scale) -> str:
    x, y = _middle(place, count), scale.y(trial.drop)
    verdict = "accepted" if trial.accepted else "rejected"
    size = 5 if count <= 80 else 3
    mark = f'<circle class="{verdict}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"></circle>'
    if trial.drop > scale.high:
        corners = f"{x - size:.1f},{y + size + 3:.1f} {x + size:.1f},{y + size + 3:.1f} {x:.1f},{y - size + 3:.1f}"
        mark = f'<polygon class="rejected" points="{corners}"></polygon>'
    said = (
        f"{', '.join(trial.groups)} at {trial.share:.0%} kept: {trial.drop:.2f} points lost, "
        f"{trial.allowed:.2f} allowed, {verdict}"
    )
    return f"<g><title>{escape(said)}</title>{mark}</g>"


def _trial_axis(count: int) -> str:
    step = max(1, math.ceil(count / 20))
    y = TOP + PLOT_HEIGHT + 18
    numbers = (_text("tick", _middle(place, count), y, str(place + 1)) for place in range(0, count, step))
    return "".join(numbers) + _text("tick", WIDTH / 2, y + 20, "trial")


_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="6" height="6"></rect><rect class="hatch-line" width="2" height="6"></rect>'
    "</pattern></defs>"
)
