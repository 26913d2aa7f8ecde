"""The groups of a network as one SVG drawing that needs nothing else: no script, no font, no picture from outside.

A box is a group: the wider, the more channels. Lines show which group is read to make which; `layout` says where.
This module computes what is shown; `templates/groups.svg` writes the SVG.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recoup.errors import ArtefactError, UsageError
from recoup.report.formatting import short
from recoup.report.layout import BOX_HEIGHT, Box, Drawing, Line, Link, Spot, Trunk, arrange
from recoup.report.templates import render

if TYPE_CHECKING:  # the inspection draws itself with this module
    from recoup.report.inspection import InspectedGroup, Inspection

MARGIN = 24.0
HEADER = 132.0
LEAST_WIDTH = 720.0
# A box of one channel, and of the network's widest group; between them the width grows with the root of the channels.
NARROWEST, WIDEST = 226.0, 400.0
INDENT, OUTLINE = 10.0, 0.8
# Within a box, from its text's left end: where a percentage ends, where its bar begins, how long the longest bar is.
PERCENT_END, BAR_START, BAR_LENGTH, BAR_HEIGHT = 136.0, 144.0, 62.0, 5.0
# Room for one character in fonts that run wide.
HEADING_CHARACTER, NAME_CHARACTER, SMALL_CHARACTER, NOTE_CHARACTER = 12.4, 7.3, 6.4, 6.7
# Room for the sign of a legend's entry, and between entries.
SIGN, BETWEEN = 28.0, 20.0
STUB = 16.0
MOST_LAYERS_NAMED = 12
FREE, PARTLY, LOCKED = "free", "partly", "locked"
STATES = {FREE: "free", PARTLY: "partly locked", LOCKED: "locked, has to stay"}
STROKES = {"joins": "written again: addition or gate", "outside": "input, output, or what is not followed"}
# What the template needs of the sizes above.
_SIZES = {
    "margin": MARGIN,
    "sign": SIGN,
    "indent": INDENT,
    "outline": OUTLINE,
    "box_height": BOX_HEIGHT,
    "bar_height": BAR_HEIGHT,
    "bar_start": BAR_START,
    "percent_end": PERCENT_END,
}


@dataclass(frozen=True, slots=True)
class Sign:
    """An entry of the legend: a box or a line of this kind, and its meaning."""

    x: float
    kind: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line: its class, its SVG path, and what the pointer shows."""

    kind: str
    path: str
    title: str
    has_arrow: bool


@dataclass(frozen=True, slots=True)
class Measure:
    """A cost of a group, its share of the network, and the length of the bar for that."""

    kind: str
    y: float
    text: str
    share: str
    length: float


@dataclass(frozen=True, slots=True)
class GroupBox:
    """A group: its box, its texts, and how wide the locked part is."""

    title: str
    state: str
    box: Box
    name: str
    more: str
    more_x: float
    count: str
    measures: tuple[Measure, ...]
    locked_width: float


def draw(inspection: Inspection) -> str:
    """A self-contained SVG: every group once, what is read to make it, its cost, and what is locked."""
    drawing, heading = arrange(_widths(inspection.groups), _links(inspection)), _heading(inspection)
    width = max(LEAST_WIDTH, 2 * MARGIN + drawing.width, 2 * MARGIN + len(heading) * HEADING_CHARACTER)
    longest = _longest_bar(inspection.groups)
    return render(
        "groups.svg",
        heading=heading,
        width=width,
        height=HEADER + drawing.height + 2 * MARGIN + STUB,
        corner=Spot((width - drawing.width) / 2, HEADER + STUB),
        prospect=inspection.prospect,
        states=_legend(STATES),
        strokes=_legend(STROKES),
        longest=longest,
        lines=_lines(inspection, drawing),
        dots=[line.end for line in drawing.lines if line.joins],
        stubs=_stubs(inspection, drawing),
        groups=[_group(group, box, longest) for group, box in zip(inspection.groups, drawing.boxes, strict=True)],
        **_SIZES,
    )


def require_new_picture(path: str | Path) -> None:
    """Refuse a picture's file that is there already or could not be made, before any work is done for it."""
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise UsageError(f"{path} is not the name of an SVG file. Choose one that ends in .svg.")
    if path.exists():
        raise ArtefactError(f"{path} exists already. Choose another file or remove it; nothing was overwritten.")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ArtefactError(f"cannot write {path}: {above} is not a folder you may write to. Choose another one.")


def save_picture(picture: str, path: str | Path) -> Path:
    """Write a new file, and the folders above it where they are missing; it appears complete or not at all."""
    require_new_picture(path)
    path = Path(path)
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(picture, encoding="utf-8")
        draft.rename(path)
    except OSError as error:
        raise ArtefactError(f"cannot write {path} ({error.strerror or error}). Choose another file.") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return path


def _widths(groups: Sequence[InspectedGroup]) -> list[float]:
    most = max((group.row.before for group in groups), default=1)
    return [NARROWEST + (WIDEST - NARROWEST) * math.sqrt(group.row.before / most) for group in groups]


def _links(inspection: Inspection) -> list[Link]:
    number = {group.row.name: place for place, group in enumerate(inspection.groups)}
    return [Link(number[edge.source], number[edge.target]) for edge in inspection.edges]


def _heading(inspection: Inspection) -> str:
    cost = inspection.cost
    return f"{inspection.network}: {short(cost.macs)} MACs, {short(cost.parameters)} parameters"


def _longest_bar(groups: Iterable[InspectedGroup]) -> float:
    return max((max(group.macs_share, group.parameters_share) for group in groups), default=0.0)


def _legend(meanings: dict[str, str]) -> list[Sign]:
    """Entries one after the other."""
    signs, x = [], MARGIN
    for kind, meaning in meanings.items():
        signs.append(Sign(x, kind, meaning))
        x += SIGN + len(meaning) * NOTE_CHARACTER + BETWEEN
    return signs


def _lines(inspection: Inspection, drawing: Drawing) -> list[Stroke]:
    """Lanes, lines between boxes, and loops of groups that are read to make themselves."""
    names = [group.row.name for group in inspection.groups]
    own = [link.source for link in _links(inspection) if link.source == link.target]
    return [
        *(_trunk(trunk, names) for trunk in drawing.trunks),
        *(_line(line, names) for line in drawing.lines),
        *(_loop(drawing.boxes[box], names[box]) for box in own),
    ]


def _trunk(trunk: Trunk, names: Sequence[str]) -> Stroke:
    path = f"{_curve(trunk.start, trunk.turn)}V{trunk.end.y:.1f}"
    return Stroke("lane", path, names[trunk.box], has_arrow=False)


def _line(line: Line, names: Sequence[str]) -> Stroke:
    verb = "writes into" if line.joins else "is read to make"
    title = f"{names[line.link.source]} {verb} {names[line.link.target]}"
    return Stroke("edge", _curve(line.start, line.end), title, has_arrow=not line.joins)


def _curve(start: Spot, end: Spot) -> str:
    """Leaves and arrives upright."""
    if start.x == end.x:
        return f"M{start.x:.1f} {start.y:.1f}V{end.y:.1f}"
    middle = (start.y + end.y) / 2
    return f"M{start.x:.1f} {start.y:.1f}C{start.x:.1f} {middle:.1f} {end.x:.1f} {middle:.1f} {end.x:.1f} {end.y:.1f}"


def _loop(box: Box, name: str) -> Stroke:
    x, y = box.x + box.width, box.y + BOX_HEIGHT / 2
    return Stroke("edge", f"M{x:.1f} {y - 14:.1f}c16 0 16 28 0 28", f"{name} is read to make itself", has_arrow=True)


def _stubs(inspection: Inspection, drawing: Drawing) -> Iterable[Stroke]:
    """Short lines into groups that are fed from outside, and out of groups that the model returns."""
    trunks = {trunk.box: trunk.end for trunk in drawing.trunks}
    arrivals, departures = {line.end for line in drawing.lines}, {line.start for line in drawing.lines}
    for place, (group, box) in enumerate(zip(inspection.groups, drawing.boxes, strict=True)):
        name = group.row.name
        if name in inspection.inputs:
            end = _beside(box, box.top) if box.top in arrivals else box.top
            yield _stub(Spot(end.x, end.y - STUB), f"{name} reads what no group holds")
        if name in inspection.outputs:
            start = trunks.get(place, box.bottom)
            yield _stub(_beside(box, box.bottom) if start in departures else start, f"the model returns {name}")


def _beside(box: Box, port: Spot) -> Spot:
    """Another place on the same edge, where other lines arrive or leave at `port`."""
    return Spot(box.x + box.width / 4, port.y)


def _stub(start: Spot, title: str) -> Stroke:
    return Stroke("outside", f"M{start.x:.1f} {start.y:.1f}v{STUB:.1f}", title, has_arrow=True)


def _group(group: InspectedGroup, box: Box, longest: float) -> GroupBox:
    """Name and channels; MACs with their share; parameters with theirs."""
    state, more = _state(group), _more(group)
    count = _count(group, state)
    room = int((box.width - 3 * INDENT - (1 + len(count + more)) * SMALL_CHARACTER) / NAME_CHARACTER)
    name = _shortened(group.row.name, room)
    return GroupBox(
        title=_story(group),
        state=state,
        box=box,
        name=name,
        more=more,
        more_x=box.x + INDENT + (len(name) + 0.5) * NAME_CHARACTER,
        count=count,
        measures=_measures(group, box, longest),
        locked_width=box.width * group.row.locked / group.row.before if state == PARTLY else 0.0,
    )


def _state(group: InspectedGroup) -> str:
    if not group.row.locked:
        return FREE
    return LOCKED if group.row.locked == group.row.before else PARTLY


def _count(group: InspectedGroup, state: str) -> str:
    row = group.row
    return f"{row.before - row.locked:,} of {row.before:,} free" if state == PARTLY else f"{row.before:,} {state}"


def _more(group: InspectedGroup) -> str:
    """How many layers make the group beside the one it is named after."""
    others = len(group.row.producers) - 1
    return f"+{others}" if others > 0 else ""


def _measures(group: InspectedGroup, box: Box, longest: float) -> tuple[Measure, Measure]:
    scale = BAR_LENGTH / longest if longest else 0.0
    macs, parameters = group.macs_share, group.parameters_share
    return (
        Measure("macs", box.y + 37, f"{short(group.macs)} MACs", f"{macs:.1%}", macs * scale),
        Measure("parameters", box.y + 53, f"{short(group.parameters)} params", f"{parameters:.1%}", parameters * scale),
    )


def _story(group: InspectedGroup) -> str:
    """What the pointer shows."""
    row = group.row
    lines = [
        row.name,
        f"{row.before:,} channels, {row.before - row.locked:,} free",
        f"{group.macs:,} MACs ({group.macs_share:.2%}), {group.parameters:,} parameters ({group.parameters_share:.2%})",
        f"made by {_listed(row.producers)}",
        f"read by {_listed(row.consumers)}",
        *(f"locked: {reason}" for reason in row.reasons),
    ]
    return "\n".join(lines)


def _listed(layers: Sequence[str]) -> str:
    more = len(layers) - MOST_LAYERS_NAMED
    return ", ".join(layers[:MOST_LAYERS_NAMED]) + (f" and {more} more" if more > 0 else "") or "no layer"


def _shortened(name: str, room: int) -> str:
    """Numbers and the end of a dotted name tell siblings apart: other parts go first, then the front."""
    if len(name) <= room:
        return name
    told = re.sub(r"(?<![^.])(?:[^.\d]+\.)+", "…", name)
    return told if len(told) <= room else f"…{told[len(told) - room + 1 :]}"
