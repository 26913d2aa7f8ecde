import itertools
import random

import pytest

from recoup.report.layout import BOX_HEIGHT, COLUMN_GAP, LANE_GAP, Box, Drawing, Link, arrange


def linked(*pairs: tuple[int, int]) -> list[Link]:
    return [Link(*pair) for pair in pairs]


def random_wiring(seed: int, count: int) -> tuple[list[float], list[Link]]:
    """Boxes that read some of the ten before them, some of which write back into earlier ones."""
    draw = random.Random(seed)
    reads = {(draw.randrange(max(0, box - 10), box), box) for box in range(1, count) for _ in range(draw.randint(0, 3))}
    writes = {(box, draw.randrange(box)) for box in range(1, count) if draw.random() < 0.3}
    widths = [draw.uniform(200, 400) for _ in range(count)]
    return widths, linked(*sorted(reads), *sorted(writes))


WIRINGS = {
    "chain": ([300.0] * 5, linked((0, 1), (1, 2), (2, 3), (3, 4))),
    "residual": ([300.0] * 4, linked((0, 1), (1, 0), (0, 2), (2, 0), (0, 3))),
    "branches": ([300.0] * 6, linked((0, 1), (0, 2), (2, 3), (0, 4), (1, 5), (3, 5), (4, 5))),
    "dense": ([300.0] * 8, [Link(*pair) for pair in itertools.combinations(range(8), 2)]),
    "shortcut first": ([300.0] * 4, linked((0, 1), (0, 2), (2, 1), (1, 3))),
    "late branch": ([300.0] * 4, linked((0, 1), (1, 2), (0, 3), (3, 2))),
    "gate in residual": ([300.0] * 4, linked((0, 1), (1, 2), (2, 1), (1, 0), (0, 3))),
    "apart": ([300.0] * 3, []),
    "single": ([300.0], linked((0, 0))),
    **{f"random {count}": random_wiring(count, count) for count in (5, 20, 60, 150)},
}


@pytest.fixture(params=WIRINGS)
def wiring(request) -> tuple[list[float], list[Link]]:
    return WIRINGS[request.param]


def overlaps(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] < b[1] - 1e-6 and b[0] < a[1] - 1e-6


def across(box: Box) -> tuple[float, float]:
    return box.x, box.x + box.width


def down(box: Box) -> tuple[float, float]:
    return box.y, box.y + BOX_HEIGHT


def rows(drawing: Drawing) -> list[int]:
    heights = sorted({box.y for box in drawing.boxes})
    return [heights.index(box.y) for box in drawing.boxes]


def test_boxes_keep_their_distance(wiring):
    drawing = arrange(*wiring)
    assert [box.width for box in drawing.boxes] == wiring[0]
    for a, b in itertools.combinations(drawing.boxes, 2):
        wide = (a.x - COLUMN_GAP, a.x + a.width + COLUMN_GAP)
        assert not (overlaps(wide, across(b)) and overlaps(down(a), down(b)))


def test_everything_is_within_the_picture(wiring):
    drawing = arrange(*wiring)
    assert min(box.x for box in drawing.boxes) >= 0 and min(box.y for box in drawing.boxes) == 0
    assert max(box.x + box.width for box in drawing.boxes) <= drawing.width + 1e-6
    assert max(box.y + BOX_HEIGHT for box in drawing.boxes) <= drawing.height + 1e-6
    points = [point for trunk in drawing.trunks for point in (trunk.start, trunk.turn, trunk.end)]
    points += [point for line in drawing.lines for point in (line.start, line.end)]
    assert all(0 <= point.x <= drawing.width + 1e-6 and 0 <= point.y <= drawing.height + 1e-6 for point in points)


def test_every_link_but_loops_has_one_line(wiring):
    lines = arrange(*wiring).lines
    expected = [link for link in wiring[1] if link.source != link.target]
    assert sorted((a.link.source, a.link.target) for a in lines) == sorted((a.source, a.target) for a in expected)
    assert all(line.joins == (line.link.source > line.link.target) for line in lines)


def test_lines_run_down_between_rows(wiring):
    drawing = arrange(*wiring)
    curves = [(line.start.y, line.end.y) for line in drawing.lines]
    curves += [(trunk.start.y, trunk.turn.y) for trunk in drawing.trunks]
    assert all(start < end for start, end in curves)
    assert not any(overlaps(curve, down(box)) for curve in curves for box in drawing.boxes)


def test_lanes_touch_neither_boxes_nor_each_other(wiring):
    drawing = arrange(*wiring)
    for trunk in drawing.trunks:
        lane = (trunk.turn.y, trunk.end.y)
        beside = (trunk.turn.x - LANE_GAP, trunk.turn.x + LANE_GAP)
        assert not any(overlaps(beside, across(box)) and overlaps(lane, down(box)) for box in drawing.boxes)
    for a, b in itertools.combinations(drawing.trunks, 2):
        is_near = abs(a.turn.x - b.turn.x) < LANE_GAP - 1e-6
        assert not (is_near and overlaps((a.turn.y, a.end.y), (b.turn.y, b.end.y)))


def test_lines_begin_and_end_where_they_should(wiring):
    drawing = arrange(*wiring)
    trunks = {trunk.box: trunk for trunk in drawing.trunks}
    for line in drawing.lines:
        source, target = line.link.source, line.link.target
        if line.start != drawing.boxes[source].bottom:
            assert line.start.x == trunks[source].turn.x
            assert trunks[source].turn.y <= line.start.y <= trunks[source].end.y
        if line.joins:
            assert line.end.x == trunks[target].turn.x
            assert trunks[target].turn.y <= line.end.y <= trunks[target].end.y
        else:
            assert line.end == drawing.boxes[target].top


def test_what_was_written_is_read_below(wiring):
    """A box is below those that wrote, before it ran, into what it reads."""
    drawing = arrange(*wiring)
    joins = [line for line in drawing.lines if line.joins]
    for line in drawing.lines:
        before = [a for a in joins if a.link.target == line.link.source and a.link.source < line.link.target]
        if not line.joins:
            reader = drawing.boxes[line.link.target]
            assert all(drawing.boxes[a.link.source].bottom.y < reader.y for a in before)
            assert drawing.boxes[line.link.source].bottom.y < reader.y


def test_a_line_from_a_lane_leaves_below_what_joined_it():
    drawing = arrange(*WIRINGS["residual"])
    reads = {line.link.target: line for line in drawing.lines if not line.joins}
    joins = {line.link.source: line for line in drawing.lines if line.joins}
    assert reads[1].start == drawing.boxes[0].bottom
    assert joins[1].end.y <= reads[2].start.y < joins[2].end.y <= reads[3].start.y


def test_a_shortcut_that_comes_first_is_read_after_the_block_has_joined_it():
    drawing = arrange(*WIRINGS["shortcut first"])
    lines = {(line.link.source, line.link.target): line for line in drawing.lines}
    assert lines[1, 3].start != drawing.boxes[1].bottom
    assert lines[2, 1].end.y <= lines[1, 3].start.y


def test_rows():
    expected = {
        "chain": [0, 1, 2, 3, 4],
        "residual": [0, 1, 2, 3],
        "branches": [0, 1, 1, 2, 1, 3],
        "dense": list(range(8)),
        "shortcut first": [0, 1, 1, 2],
        "gate in residual": [0, 1, 2, 3],
        "apart": [0, 1, 2],
    }
    assert {name: rows(arrange(*WIRINGS[name])) for name in expected} == expected


def test_boxes_that_read_none_are_abreast_only_at_the_top():
    assert rows(arrange([300.0] * 3, linked((0, 2), (1, 2)))) == [0, 0, 1]
    assert rows(arrange([300.0] * 4, linked((0, 1), (2, 3)))) == [0, 1, 2, 3]


def test_a_gate_within_a_residual_goes_from_lane_to_lane():
    drawing = arrange(*WIRINGS["gate in residual"])
    lanes = {trunk.box: trunk for trunk in drawing.trunks}
    gate, block = (next(a for a in drawing.lines if a.joins and a.link == Link(*pair)) for pair in ((2, 1), (1, 0)))
    assert gate.end.y <= block.start.y < block.end.y
    assert (block.start.x, block.end.x) == (lanes[1].turn.x, lanes[0].turn.x)


def test_branches_do_not_cross():
    widths, links = [300.0] * 7, linked((0, 1), (0, 2), (0, 3), (3, 4), (2, 5), (1, 6))
    boxes = arrange(widths, links).boxes
    assert [boxes[a].y for a in (1, 2, 3)] == [boxes[1].y] * 3 and [boxes[a].y for a in (4, 5, 6)] == [boxes[4].y] * 3
    upper, lower = sorted((1, 2, 3), key=lambda a: boxes[a].x), sorted((4, 5, 6), key=lambda a: boxes[a].x)
    reader = {3: 4, 2: 5, 1: 6}
    assert [reader[a] for a in upper] == lower


def test_readers_are_sorted_below_boxes_that_have_to_stay_where_they_are():
    """Lanes hold 1 and 2 on their sides, so 3 and 4 have to change places."""
    boxes = arrange([300.0] * 6, linked((0, 1), (0, 2), (2, 3), (1, 4), (1, 5), (2, 5), (3, 5), (4, 5))).boxes
    assert (boxes[1].x < boxes[2].x) == (boxes[4].x < boxes[3].x)


def test_what_has_a_lane_is_outside():
    """Of three branches the second skips a row."""
    drawing = arrange([300.0] * 7, linked((0, 1), (0, 2), (0, 3), (1, 4), (3, 5), *((a, 6) for a in (2, 4, 5))))
    assert sorted((1, 2, 3), key=lambda a: drawing.boxes[a].x) == [1, 3, 2]
    lanes = {trunk.box: trunk.turn.x for trunk in drawing.trunks}
    assert lanes[2] > drawing.boxes[5].x + 300 > drawing.boxes[4].x


def test_lanes_on_both_sides():
    """Four branches, of which the first and the last skip a row."""
    links = linked((0, 1), (0, 2), (2, 3), (0, 4), (4, 5), (0, 6), *((a, 7) for a in (1, 3, 5, 6)))
    drawing = arrange([300.0] * 8, links)
    assert sorted((1, 2, 4, 6), key=lambda a: drawing.boxes[a].x) == [1, 2, 4, 6]
    lanes = {trunk.box: trunk.turn.x for trunk in drawing.trunks}
    assert lanes[1] < drawing.boxes[3].x < drawing.boxes[5].x + 300 < lanes[6]


def test_boxes_are_near_their_neighbours():
    boxes = arrange([300.0] * 5, linked((0, 1), (0, 2), (0, 3), (1, 4))).boxes
    assert boxes[1].x < boxes[4].x < boxes[2].x - 100


def test_a_chain_is_straight_and_long_lanes_are_outside_short_ones():
    chain = [(box, box + 1) for box in range(7)]
    drawing = arrange([300.0, 400.0] * 4, linked(*chain, (0, 7), (1, 6), (2, 5)))
    middle = drawing.boxes[0].top.x
    assert all(box.top.x == pytest.approx(middle) for box in drawing.boxes)
    lanes = {trunk.box: trunk.turn.x - middle for trunk in drawing.trunks}
    # a side is used again only when both are taken
    assert lanes == pytest.approx({2: 200 + LANE_GAP, 1: -200 - LANE_GAP, 0: 200 + 2 * LANE_GAP})


def test_nothing_at_all():
    assert arrange([], []) == Drawing((), (), (), 0.0, 0.0)
