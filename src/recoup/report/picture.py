"""The groups of a network as one SVG drawing that needs nothing else: no script, no font, no picture from outside.

A box is a group: the wider, the more channels. Lines show which group is read to make which; `layout` says where.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from recoup.errors import ArtefactError, UsageError
from recoup.report.layout import BOX_HEIGHT, Box, Layout, Line, Link, Point, Trunk, arrange
from recoup.report.numbers import short

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
STUB = 16.0
MOST_LAYERS_NAMED = 12
FREE, PARTLY, LOCKED = "free", "partly", "locked"
_MORE = "+2: made by two more layers"


def draw(inspection: Inspection) -> str:
    """A self-contained SVG: every group once, what is read to make it, its cost, and what is locked."""
    layout, heading = arrange(_widths(inspection.groups), _links(inspection)), _heading(inspection)
    width = max(LEAST_WIDTH, 2 * MARGIN + layout.width, 2 * MARGIN + len(heading) * HEADING_CHARACTER)
    height = HEADER + layout.height + 2 * MARGIN + STUB
    body = _translated((width - layout.width) / 2, HEADER + STUB, _graph(inspection, layout))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="recoup" role="img" aria-label="{_said(heading)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">'
        f'<style>{_STYLE}</style>{_DEFINITIONS}<rect class="ground" width="100%" height="100%"/>'
        f"{_text('heading', MARGIN, 32, heading)}{_notes(inspection)}{body}</svg>\n"
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


def _notes(inspection: Inspection) -> str:
    """What can be pruned, and the legend: states of a group, what lines mean, what sizes mean."""
    states = ((FREE, "free"), (PARTLY, "partly locked"), (LOCKED, "locked, has to stay"))
    marks = (("joins", "written again: addition or gate"), ("outside", "input, output, or what is not followed"))
    full = _longest_bar(inspection.groups)
    return (
        _text("note", MARGIN, 52, inspection.prospect)
        + _keys([(_swatch(kind), text) for kind, text in states], 78)
        + _keys([(_mark(kind), text) for kind, text in marks], 98)
        + _text("note", MARGIN, 118, f"Width: channels. Bars: share of the network, full at {full:.1%}. {_MORE}")
    )


def _keys(entries: Iterable[tuple[str, str]], y: float) -> str:
    """Marks, each with its meaning, one after the other."""
    parts, x = [], MARGIN
    for mark, meaning in entries:
        parts.append(_translated(x, y, mark + _text("note", 28, 0, meaning)))
        x += 28 + len(meaning) * NOTE_CHARACTER + 20
    return "".join(parts)


def _swatch(state: str) -> str:
    part = _rect("part", 11, -10 + OUTLINE, 11 - OUTLINE, 12 - 2 * OUTLINE) if state == PARTLY else ""
    return _rect(state, 0, -10, 22, 12) + part


def _mark(kind: str) -> str:
    line = f'<path class="{kind}" d="M0 -4H22"/>'
    return line + (_dot(Point(11, -4)) if kind == "joins" else "")


def _graph(inspection: Inspection, layout: Layout) -> str:
    """Lines first, so that boxes lie above them."""
    names = [group.row.name for group in inspection.groups]
    trunks = (_trunk(trunk, names) for trunk in layout.trunks)
    lines = (_line(line, names) for line in layout.lines)
    own = [link.source for link in _links(inspection) if link.source == link.target]
    loops = (_loop(layout.boxes[box], names[box]) for box in own)
    dots = (_dot(line.end) for line in layout.lines if line.joins)
    longest = _longest_bar(inspection.groups)
    boxes = (_group(group, box, longest) for group, box in zip(inspection.groups, layout.boxes, strict=True))
    return "".join((*trunks, *lines, *loops, *dots, *_stubs(inspection, layout), *boxes))


def _trunk(trunk: Trunk, names: Sequence[str]) -> str:
    path = f"{_curve(trunk.start, trunk.turn)}V{trunk.end.y:.1f}"
    return f'<path class="lane" d="{path}"><title>{_said(names[trunk.box])}</title></path>'


def _line(line: Line, names: Sequence[str]) -> str:
    verb = "writes into" if line.joins else "is read to make"
    said = f"{names[line.link.source]} {verb} {names[line.link.target]}"
    arrow = "" if line.joins else ' marker-end="url(#recoup-arrow)"'
    return f'<path class="edge" d="{_curve(line.start, line.end)}"{arrow}><title>{_said(said)}</title></path>'


def _curve(start: Point, end: Point) -> str:
    """Leaves and arrives upright."""
    if start.x == end.x:
        return f"M{start.x:.1f} {start.y:.1f}V{end.y:.1f}"
    middle = (start.y + end.y) / 2
    return f"M{start.x:.1f} {start.y:.1f}C{start.x:.1f} {middle:.1f} {end.x:.1f} {middle:.1f} {end.x:.1f} {end.y:.1f}"


def _loop(box: Box, name: str) -> str:
    x, y = box.x + box.width, box.y + BOX_HEIGHT / 2
    path = f"M{x:.1f} {y - 14:.1f}c16 0 16 28 0 28"
    return (
        f'<path class="edge" d="{path}" marker-end="url(#recoup-arrow)">'
        f"<title>{_said(f'{name} is read to make itself')}</title></path>"
    )


def _dot(point: Point) -> str:
    return f'<circle class="join" cx="{point.x:.1f}" cy="{point.y:.1f}" r="3.5"/>'


def _stubs(inspection: Inspection, layout: Layout) -> Iterable[str]:
    """Short lines into groups that are fed from outside, and out of groups that the model returns."""
    trunks = {trunk.box: trunk.end for trunk in layout.trunks}
    arrivals, departures = {line.end for line in layout.lines}, {line.start for line in layout.lines}
    for place, (group, box) in enumerate(zip(inspection.groups, layout.boxes, strict=True)):
        name = group.row.name
        if name in inspection.inputs:
            end = _beside(box, box.top) if box.top in arrivals else box.top
            yield _stub(Point(end.x, end.y - STUB), f"{name} reads what no group holds")
        if name in inspection.outputs:
            start = trunks.get(place, box.bottom)
            yield _stub(_beside(box, box.bottom) if start in departures else start, f"the model returns {name}")


def _beside(box: Box, port: Point) -> Point:
    """Another place on the same edge, where other lines arrive or leave at `port`."""
    return Point(box.x + box.width / 4, port.y)


def _stub(start: Point, said: str) -> str:
    return (
        f'<path class="outside" d="M{start.x:.1f} {start.y:.1f}v{STUB:.1f}" marker-end="url(#recoup-arrow)">'
        f"<title>{_said(said)}</title></path>"
    )


def _group(group: InspectedGroup, box: Box, longest: float) -> str:
    """Name and channels; MACs with their share; parameters with theirs."""
    row, state, left = group.row, _state(group), box.x + INDENT
    count, more = _count(group, state), _more(group)
    room = int((box.width - 3 * INDENT - (1 + len(count + more)) * SMALL_CHARACTER) / NAME_CHARACTER)
    name = _shortened(row.name, room)
    content = (
        f"<title>{_said(_story(group))}</title>",
        _rect(f"box {state}", box.x, box.y, box.width, BOX_HEIGHT),
        _locked_part(group, box) if state == PARTLY else "",
        _text("name", left, box.y + 19, name),
        _text("small", left + (len(name) + 0.5) * NAME_CHARACTER, box.y + 19, more),
        _text("small", box.x + box.width - INDENT, box.y + 19, count, "end"),
        _measure("macs", Point(left, box.y + 37), f"{short(group.macs)} MACs", group.macs_share, longest),
        _measure(
            "parameters", Point(left, box.y + 53), f"{short(group.parameters)} params", group.parameters_share, longest
        ),
    )
    return f'<g class="group">{"".join(content)}</g>'


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


def _locked_part(group: InspectedGroup, box: Box) -> str:
    """On the right, as wide as the locked share of the channels, within the outline."""
    wide = box.width * group.row.locked / group.row.before
    return _rect("part", box.x + box.width - wide, box.y + OUTLINE, wide - OUTLINE, BOX_HEIGHT - 2 * OUTLINE)


def _shortened(name: str, room: int) -> str:
    """Numbers and the end of a dotted name tell siblings apart: other parts go first, then the front."""
    if len(name) <= room:
        return name
    told = re.sub(r"(?<![^.])(?:[^.\d]+\.)+", "…", name)
    return told if len(told) <= room else f"…{told[len(told) - room + 1 :]}"


def _measure(kind: str, place: Point, text: str, share: float, longest: float) -> str:
    """A figure, its share of the network, and a bar for that."""
    long = BAR_LENGTH * share / longest if longest else 0.0
    return (
        _text("small", place.x, place.y, text)
        + _text("small", place.x + PERCENT_END, place.y, f"{share:.1%}", "end")
        + _rect(kind, place.x + BAR_START, place.y - BAR_HEIGHT - 1.5, long, BAR_HEIGHT)
    )


def _longest_bar(groups: Iterable[InspectedGroup]) -> float:
    return max((max(group.macs_share, group.parameters_share) for group in groups), default=0.0)


def _rect(kind: str, x: float, y: float, wide: float, high: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'


def _text(kind: str, x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_said(content)}</text>'


def _translated(x: float, y: float, content: str) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{content}</g>'


def _said(text: str) -> str:
    """Escaped, and without the control characters that XML does not have."""
    return escape("".join(character for character in text if character.isprintable() or character == "\n"))


_DEFINITIONS = (
    '<defs><pattern id="recoup-hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="7" height="7"/><rect class="hatch-line" width="2" height="7"/></pattern>'
    '<marker id="recoup-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 1 8 4 0 7z"/></marker></defs>'
)

# Colours are written out, as few programs besides browsers know CSS variables; `.recoup` keeps them off a page around.
_STYLE = """
.recoup { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.recoup .ground { fill: #fff; }
.recoup .heading { fill: #16202c; font-size: 20px; font-weight: 650; }
.recoup .note { fill: #5b6877; font-size: 12px; }
.recoup .name { fill: #16202c; font: 600 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.recoup .small { fill: #37434f; font-size: 11px; font-variant-numeric: tabular-nums; }
.recoup .box, .recoup .part { rx: 6px; }
.recoup .free { fill: #e3edfc; stroke: #2563c9; }
.recoup .partly { fill: #e3edfc; stroke: #c2410c; stroke-dasharray: 5 3; }
.recoup .locked, .recoup .part { fill: url(#recoup-hatch); stroke: #64748b; }
.recoup .part { stroke: none; }
.recoup .hatch-ground { fill: #eef1f5; } .recoup .hatch-line { fill: #dfe4ea; }
.recoup .macs { fill: #2563c9; } .recoup .parameters { fill: #8296ad; }
.recoup .edge, .recoup .lane, .recoup .joins { fill: none; stroke: #8a97a6; stroke-width: 1.4; }
.recoup .outside { fill: none; stroke: #8a97a6; stroke-width: 1.4; stroke-dasharray: 3 3; }
.recoup .head, .recoup .join { fill: #5b6877; }
@media (prefers-color-scheme: dark) {
.recoup .ground { fill: #10151c; }
.recoup .heading, .recoup .name { fill: #e6ebf1; } .recoup .note { fill: #98a6b5; } .recoup .small { fill: #c3ced9; }
.recoup .free { fill: #1a2c48; stroke: #6ea3f5; } .recoup .partly { fill: #1a2c48; stroke: #fb923c; }
.recoup .locked { stroke: #94a3b8; } .recoup .hatch-ground { fill: #1d2530; } .recoup .hatch-line { fill: #2a3542; }
.recoup .macs { fill: #6ea3f5; } .recoup .parameters { fill: #7c8fa5; }
.recoup .edge, .recoup .lane, .recoup .joins, .recoup .outside { stroke: #66768a; }
.recoup .head, .recoup .join { fill: #98a6b5; } }
"""
