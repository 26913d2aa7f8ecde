"""The geometry of the report's two charts: every group's width, and the course of the search.

`templates/charts.html` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.allocation.goal import Trial
from recoup.report.content import GroupRow

WIDTH = 960
LEFT, RIGHT = 56, 948
TOP, BOTTOM = 22, 222
# Room below the plot: for slanted names, for nothing, for the numbers of the trials.
BELOW_NAMES, BELOW_BARS, BELOW_TRIALS = 96, 14, 44
# More columns than this leave no room for their names; the pointer still shows them.
MOST_LABELS = 24
# Up to this many columns are wide enough for the width before and after.
MOST_PAIRS = 12
LABEL_LENGTH = 16
WIDEST_COLUMN = 56
# Drops beyond this multiple of the largest allowance are drawn at the upper edge, so that the others stay apart.
CLIP = 2.0
# More marks than this would overlap at the larger radius.
MOST_LARGE_MARKS, LARGE_MARK, SMALL_MARK = 80, 5, 3
MOST_NUMBERS = 20


@dataclass(frozen=True, slots=True)
class PlotArea:
    """Size of a chart, and the edges of the plot within it."""

    height: int
    width: int = WIDTH
    left: int = LEFT
    right: int = RIGHT
    bottom: int = BOTTOM


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a column: "gone", "kept" or "locked" channels."""

    kind: str
    top: float
    height: float


@dataclass(frozen=True, slots=True)
class Column:
    """A group: later bars lie on earlier ones. `value` and `label` are empty where there is no room for them."""

    title: str
    left: float
    middle: float
    bars: tuple[Bar, ...]
    value: str
    value_y: float
    label: str


@dataclass(frozen=True, slots=True)
class WidthChart:
    """One column per group, in the order of the network."""

    area: PlotArea
    ticks: tuple[Tick, ...]
    columns: tuple[Column, ...]
    bar_width: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A trial: a circle, or a triangle with these `corners` at the upper edge. Some have their `number` below."""

    title: str
    verdict: str
    x: float
    y: float
    corners: str
    number: str


@dataclass(frozen=True, slots=True)
class SearchChart:
    """Points lost in every trial; `allowance` is the staircase of what each was allowed to lose."""

    area: PlotArea
    ticks: tuple[Tick, ...]
    zero: float
    allowance: str
    marks: tuple[Mark, ...]
    mark_size: int

    @property
    def accepted(self) -> int:
        """Number of accepted trials."""
        return sum(mark.verdict == "accepted" for mark in self.marks)

    @property
    def is_clipped(self) -> bool:
        """Whether a trial lost more than the chart has room for."""
        return any(mark.corners for mark in self.marks)


@dataclass(frozen=True, slots=True)
class _Scale:
    """A vertical axis from `low` at the bottom of the plot to `high` at its top, and `count` places across."""

    low: float
    high: float
    count: int

    @property
    def slot(self) -> float:
        return (RIGHT - LEFT) / self.count

    def x(self, place: float) -> float:
        return LEFT + self.slot * (place + 0.5)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return TOP + (BOTTOM - TOP) * (1 - min(1.0, max(0.0, share)))

    def ticks(self) -> tuple[Tick, ...]:
        """Round numbers, about four of them."""
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        values = [round(number * step, 10) for number in numbers]
        return tuple(Tick(self.y(value), f"{value:g}") for value in values)


def width_chart(groups: Sequence[GroupRow]) -> WidthChart:
    """A column for every group: its width before, its width after, and what of it is locked."""
    scale = _Scale(0, max(group.before for group in groups) * 1.05, len(groups))
    area = PlotArea(BOTTOM + (BELOW_NAMES if len(groups) <= MOST_LABELS else BELOW_BARS))
    wide = min(WIDEST_COLUMN, 0.72 * scale.slot)
    columns = tuple(_column(group, place, scale, wide) for place, group in enumerate(groups))
    return WidthChart(area, scale.ticks(), columns, wide)


def search_chart(trials: Sequence[Trial]) -> SearchChart:
    """Points lost in every trial against the points it was allowed to lose."""
    scale = _drop_scale(trials)
    size = LARGE_MARK if len(trials) <= MOST_LARGE_MARKS else SMALL_MARK
    marks = tuple(_mark(trial, place, scale, size) for place, trial in enumerate(trials))
    area = PlotArea(BOTTOM + BELOW_TRIALS)
    return SearchChart(area, scale.ticks(), scale.y(0), _allowance(trials, scale), marks, size)


def _column(group: GroupRow, place: int, scale: _Scale, wide: float) -> Column:
    parts = (("gone", group.before), ("kept", group.after), ("locked", min(group.locked, group.after)))
    has_room = scale.count <= MOST_LABELS
    return Column(
        title=f"{group.name}: {group.before} -> {group.after} channels, {group.locked} locked",
        left=scale.x(place) - wide / 2,
        middle=scale.x(place),
        bars=tuple(Bar(kind, scale.y(size), scale.y(0) - scale.y(size)) for kind, size in parts if size),
        value=_value(group, scale.count) if has_room else "",
        value_y=scale.y(group.before) - 6,
        label=_shortened(group.name) if has_room else "",
    )


def _value(group: GroupRow, count: int) -> str:
    return f"{group.before} → {group.after}" if count <= MOST_PAIRS else str(group.after)


def _shortened(name: str) -> str:
    """The end of a dotted name tells siblings apart, so the front is what goes."""
    return name if len(name) <= LABEL_LENGTH else f"…{name[-LABEL_LENGTH + 1 :]}"


def _drop_scale(trials: Sequence[Trial]) -> _Scale:
    allowed = max(trial.allowed for trial in trials)
    drops = [trial.drop for trial in trials]
    high = max(allowed, min(max(drops), CLIP * allowed))
    return _Scale(min(0.0, *drops), high * 1.05, len(trials))


def _mark(trial: Trial, place: int, scale: _Scale, size: int) -> Mark:
    x, y = scale.x(place), scale.y(trial.drop)
    verdict = "accepted" if trial.accepted else "rejected"
    title = (
        f"{', '.join(trial.groups)} at {trial.share:.0%} kept: {trial.drop:.2f} points lost, "
        f"{trial.allowed:.2f} allowed, {verdict}"
    )
    triangle = ((x - size, y + size + 3), (x + size, y + size + 3), (x, y - size + 3))
    is_numbered = place % max(1, math.ceil(scale.count / MOST_NUMBERS)) == 0
    corners = _corners(triangle) if trial.drop > scale.high else ""
    return Mark(title, verdict, x, y, corners, str(place + 1) if is_numbered else "")


def _allowance(trials: Sequence[Trial], scale: _Scale) -> str:
    """A staircase: every trial's own allowance, as wide as its slot."""
    steps = ((place + side, scale.y(trial.allowed)) for place, trial in enumerate(trials) for side in (-0.5, 0.5))
    return _corners([(scale.x(place), y) for place, y in steps])


def _corners(places: Sequence[tuple[float, float]]) -> str:
    """Coordinates as SVG lists them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
