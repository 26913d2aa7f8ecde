"""Where the boxes and lines of a wiring are drawn: rows from top to bottom, and lanes beside them.

Boxes are numbered in the order in which the network runs. A link to a later box is a read. A link to an earlier box
is a write, as in a residual addition or a gate. A box that is written, or read further down than the next row, has a
lane: one vertical line beside the rows. Writes join the lane, and later reads leave it below them.

A gap follows every row, and lines cross rows only in lanes. A gap has up to three storeys: from a box to a lane, from
lane to lane, from a lane to a box. So a write always lies above the reads that see it.

Layout libraries draw one line per reader and know no lanes; docs/design.md compares them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

BOX_HEIGHT = 62.0
COLUMN_GAP = 22.0
LANE_GAP = 13.0
LEAST_GAP = 30.0
STOREY = 24.0
# Many lines in a storey come from far away; more height keeps them apart.
PER_LINE, MOST_EXTRA = 1.5, 30.0
SWEEPS = 8
# Boxes move towards their neighbours until no move is longer than STILL, at most MOST_MOVES times.
STILL, MOST_MOVES = 0.1, 100
# A pull towards the middle; without it a tall picture leans to a side.
INWARDS = 0.9
# Further from the middle than any place in a row.
_OUTSIDE = 1e6

TO_LANE, BETWEEN_LANES, FROM_LANE = range(3)


@dataclass(frozen=True, slots=True)
class Link:
    """From one box to another, by number."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the picture."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its upper left corner and its size."""

    x: float
    y: float
    width: float

    @property
    def top(self) -> Spot:
        """Middle of the upper edge, where lines arrive."""
        return Spot(self.x + self.width / 2, self.y)

    @property
    def bottom(self) -> Spot:
        """Middle of the lower edge, where lines leave."""
        return Spot(self.x + self.width / 2, self.y + BOX_HEIGHT)


@dataclass(frozen=True, slots=True)
class Line:
    """A link as a curve from `start` to `end`; `joins`: the end is on a lane."""

    link: Link
    start: Spot
    end: Spot
    joins: bool


@dataclass(frozen=True, slots=True)
class Trunk:
    """A box's lane: from the box to `turn`, then straight down to `end`."""

    box: int
    start: Spot
    turn: Spot
    end: Spot


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything that is drawn, from (0, 0) to (width, height). A link of a box to itself has no line."""

    boxes: tuple[Box, ...]
    trunks: tuple[Trunk, ...]
    lines: tuple[Line, ...]
    width: float
    height: float


def arrange(widths: Sequence[float], links: Sequence[Link]) -> Drawing:
    """The drawing of boxes with these widths."""
    if not widths:
        return Drawing((), (), (), 0.0, 0.0)
    wiring = _Wiring(len(widths), tuple(links))
    rows = _assign_rows(wiring)
    routing = _find_paths(wiring, rows)
    centres = _place(_order(rows, wiring, routing.spans), widths, wiring)
    lanes = _place_lanes(routing.spans, rows, centres, widths)
    return _draw(routing, rows, centres, lanes, widths)


@dataclass(frozen=True, slots=True)
class _Wiring:
    """Boxes 0..count-1 and the links between them."""

    count: int
    links: tuple[Link, ...]

    def sources(self) -> list[list[int]]:
        """For every box, the earlier ones it reads."""
        return self._ends((link.target, link.source) for link in self.links if link.source < link.target)

    def targets(self) -> list[list[int]]:
        """For every box, the later ones that read it."""
        return self._ends((link.source, link.target) for link in self.links if link.source < link.target)

    def writers(self) -> list[list[int]]:
        """For every box, the later ones that write into it."""
        return self._ends((link.target, link.source) for link in self.links if link.source > link.target)

    def _ends(self, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.count)]
        for box, other in pairs:
            found[box].append(other)
        return found


@dataclass(frozen=True, slots=True)
class _Path:
    """A link in the gap below row `gap`; `storey` None is a straight line from box to box."""

    link: Link
    gap: int
    storey: int | None


@dataclass(frozen=True, slots=True)
class _Span:
    """A lane from the gap below row `first` to the gap below row `last`."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Routing:
    """The path of every link, and the lane of every box that has one."""

    paths: tuple[_Path, ...]
    spans: dict[int, _Span]


def _assign_rows(wiring: _Wiring) -> list[int]:
    """The row of every box: below what it reads, and below all earlier writes into that (longest paths).

    A box that reads none is at the top while all before it are, otherwise below the one before it.
    """
    sources, targets, written = wiring.sources(), wiring.targets(), _all_writers(wiring)
    rows: list[int] = []
    for box in range(wiring.count):
        above = {other for source in sources[box] for other in (source, *written[source]) if other < box}
        if above:
            rows.append(1 + max(rows[other] for other in above))
        else:
            rows.append(0 if not any(rows) and (targets[box] or not rows) else rows[-1] + 1)
    return rows


def _all_writers(wiring: _Wiring) -> list[set[int]]:
    """For every box, its writers, the writers of those, and so on."""
    writers = wiring.writers()
    found: list[set[int]] = [set() for _ in range(wiring.count)]
    for box in reversed(range(wiring.count)):  # writers come later, so theirs are known
        found[box] = set(writers[box]).union(*(found[writer] for writer in writers[box]))
    return found


def _find_paths(wiring: _Wiring, rows: list[int]) -> _Routing:
    """The gap and storey of every link, and the length of every lane."""
    ends = [max(rows[other] for other in (box, *written)) for box, written in enumerate(_all_writers(wiring))]
    writes = [_write(link, rows, ends) for link in wiring.links if link.source > link.target]
    joined = {(path.link.target, path.gap) for path in writes}
    reads = [_read(link, rows, joined) for link in wiring.links if link.source < link.target]
    paths = (*reads, *writes)
    last: dict[int, int] = {}
    for path in paths:
        for box in _lanes_of(path):
            last[box] = max(last.get(box, rows[box]), path.gap)
    return _Routing(paths, {box: _Span(rows[box], gap) for box, gap in sorted(last.items())})


def _write(link: Link, rows: list[int], ends: list[int]) -> _Path:
    gap = max(ends[link.source], rows[link.target])
    return _Path(link, gap, TO_LANE if gap == rows[link.source] else BETWEEN_LANES)


def _read(link: Link, rows: list[int], joined: set[tuple[int, int]]) -> _Path:
    gap = rows[link.target] - 1
    straight = gap == rows[link.source] and (link.source, gap) not in joined
    return _Path(link, gap, None if straight else FROM_LANE)


def _lanes_of(path: _Path) -> tuple[int, ...]:
    """Boxes whose lanes the path uses."""
    uses = {
        None: (),
        TO_LANE: (path.link.target,),
        BETWEEN_LANES: (path.link.source, path.link.target),
        FROM_LANE: (path.link.source,),
    }
    return uses[path.storey]


def _order(rows: list[int], wiring: _Wiring, spans: dict[int, _Span]) -> list[list[int]]:
    """The boxes of every row from left to right: sorted by the mean of their neighbours, downwards and upwards.

    A lane runs beside the rows it passes, so a box with a lane goes to its side: the longer the lane, the further.
    """
    order = [[box for box, own in enumerate(rows) if own == row] for row in range(max(rows) + 1)]
    place = _positions(order)
    outside = {box: _OUTSIDE + span.last - span.first for box, span in spans.items() if span.last > span.first}
    sources, targets = wiring.sources(), wiring.targets()

    def above(box: int) -> float:
        return _mean([place[other] for other in sources[box]], place[box])

    def below(box: int) -> float:
        if box in outside:
            return math.copysign(outside[box], place[box])
        return _mean([place[other] for other in targets[box]], place[box])

    for _ in range(SWEEPS):
        for sweep, key in ((order, above), (order[::-1], below)):
            for boxes in sweep:
                boxes.sort(key=key)
                place |= _positions([boxes])
    return order


def _positions(order: Iterable[list[int]]) -> dict[int, float]:
    """Places in a row, counted from its middle."""
    return {box: position - (len(row) - 1) / 2 for row in order for position, box in enumerate(row)}


def _place(order: list[list[int]], widths: Sequence[float], wiring: _Wiring) -> list[float]:
    """Middle of every box: as near to the mean of its neighbours as the others in its row allow."""
    neighbours = [above + below for above, below in zip(wiring.sources(), wiring.targets(), strict=True)]
    centres = [0.0] * wiring.count
    for _ in range(MOST_MOVES):
        before = centres.copy()
        for row in (*order, *reversed(order)):
            wanted = [INWARDS * _mean([centres[other] for other in neighbours[box]], 0.0) for box in row]
            for box, centre in zip(row, _spread(wanted, [widths[box] for box in row]), strict=True):
                centres[box] = centre
        if all(abs(a - b) < STILL for a, b in zip(before, centres, strict=True)):
            break
    return centres


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _spread(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Middles near `wanted`, in the same order, without overlap, and with the same mean.

    Pushing to the right and pushing to the left both keep the distances, and so does their mean.
    """
    distances = [(a + b) / 2 + COLUMN_GAP for a, b in pairwise(widths)]
    right, left = [wanted[0]], [wanted[-1]]
    for centre, distance in zip(wanted[1:], distances, strict=True):
        right.append(max(centre, right[-1] + distance))
    for centre, distance in zip(reversed(wanted[:-1]), reversed(distances), strict=True):
        left.append(min(centre, left[-1] - distance))
    shift = (sum(wanted) - (sum(left) + sum(right)) / 2) / len(wanted)
    return [(a + b) / 2 + shift for a, b in zip(right, reversed(left), strict=True)]


def _place_lanes(
    spans: dict[int, _Span], rows: list[int], centres: list[float], widths: Sequence[float]
) -> dict[int, float]:
    """Where every lane runs: beside all rows it passes, short ones inside, on the side that is nearer."""
    left, right = _outlines(rows, centres, widths)
    lanes: dict[int, float] = {}
    for box, span in sorted(spans.items(), key=lambda item: (item[1].last - item[1].first, item[0])):
        if span.first == span.last:
            lanes[box] = centres[box]
            continue
        passed = slice(2 * span.first + 1, 2 * span.last + 2)
        before, behind = min(left[passed]) - LANE_GAP, max(right[passed]) + LANE_GAP
        is_left = centres[box] - before < behind - centres[box]
        side, lanes[box] = (left, before) if is_left else (right, behind)
        side[passed] = [lanes[box]] * len(side[passed])
    return lanes


def _outlines(rows: list[int], centres: list[float], widths: Sequence[float]) -> tuple[list[float], list[float]]:
    """Left and right ends of what is drawn so far in every row (even places) and in the gap below it (odd places)."""
    places = 2 * max(rows) + 2
    left, right = [math.inf] * places, [-math.inf] * places
    for box, row in enumerate(rows):
        left[2 * row] = min(left[2 * row], centres[box] - widths[box] / 2)
        right[2 * row] = max(right[2 * row], centres[box] + widths[box] / 2)
    return left, right


def _draw(
    routing: _Routing, rows: list[int], centres: list[float], lanes: dict[int, float], widths: Sequence[float]
) -> Drawing:
    """Heights of the gaps, and with them the coordinates of everything."""
    gaps = _storeys(routing, rows)
    edges = [edge for c, w in zip(centres, widths, strict=True) for edge in (c - w / 2, c + w / 2)]
    shift = -min(*edges, *lanes.values())
    boxes = tuple(
        Box(centre - width / 2 + shift, gaps[row].row, width)
        for centre, width, row in zip(centres, widths, rows, strict=True)
    )
    canvas = _Canvas(boxes, {box: x + shift for box, x in lanes.items()}, gaps)
    lines = tuple(canvas.line(path) for path in routing.paths)
    trunks = tuple(canvas.trunk(box, span, lines) for box, span in routing.spans.items())
    return Drawing(boxes, trunks, lines, max(*edges, *lanes.values()) + shift, gaps[-1].floors[-1])


@dataclass(frozen=True, slots=True)
class _Gap:
    """The top of a row, and the four heights that bound the three storeys below it."""

    row: float
    floors: tuple[float, float, float, float]


def _storeys(routing: _Routing, rows: list[int]) -> list[_Gap]:
    """Heights of all rows and gaps: an empty storey has none, and straight lines get enough."""
    counts: list[Counter[int | None]] = [Counter() for _ in range(max(rows) + 1)]
    for path in routing.paths:
        counts[path.gap][path.storey] += 1
    for span in routing.spans.values():
        counts[span.first][TO_LANE] += 1
    gaps: list[_Gap] = []
    y = 0.0
    for count in counts:
        sizes = [_height(STOREY, count[storey]) if count[storey] else 0.0 for storey in range(3)]
        floors = [y + BOX_HEIGHT + sum(sizes[:storey]) for storey in range(4)]
        gaps.append(_Gap(y, (floors[0], floors[1], floors[2], floors[3])))
        y = max(floors[3], floors[0] + _height(LEAST_GAP, count[None]))
    return gaps


def _height(least: float, lines: int) -> float:
    return least + min(MOST_EXTRA, PER_LINE * lines)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Coordinates of boxes, lanes and storeys, from which lines and trunks follow."""

    boxes: tuple[Box, ...]
    lanes: dict[int, float]
    gaps: list[_Gap]

    def line(self, path: _Path) -> Line:
        """The curve of a path within its storey."""
        source, target, floors = path.link.source, path.link.target, self.gaps[path.gap].floors
        if path.storey is None:
            return Line(path.link, self.boxes[source].bottom, self.boxes[target].top, joins=False)
        if path.storey == FROM_LANE:
            return Line(path.link, Spot(self.lanes[source], floors[2]), self.boxes[target].top, joins=False)
        start = self.boxes[source].bottom if path.storey == TO_LANE else Spot(self.lanes[source], floors[1])
        return Line(path.link, start, Spot(self.lanes[target], floors[path.storey + 1]), joins=True)

    def trunk(self, box: int, span: _Span, lines: Sequence[Line]) -> Trunk:
        """The lane of a box, as far down as the last line that meets it."""
        x, start = self.lanes[box], self.boxes[box].bottom
        met = [line.start.y for line in lines if line.link.source == box and line.start.x == x]
        met += [line.end.y for line in lines if line.link.target == box and line.joins]
        turn = Spot(x, self.gaps[span.first].floors[1])
        return Trunk(box, start, turn, Spot(x, max(turn.y, *met)))
