import itertools
import re
import xml.etree.ElementTree as ET

import pytest

import recoup
from recoup.channels.cost import Cost
from recoup.report.content import GroupRow
from recoup.report.inspection import Edge, InspectedGroup, Inspection
from recoup.report.layout import BOX_HEIGHT
from recoup.report.picture import BAR_LENGTH, NAME_CHARACTER, NARROWEST, SMALL_CHARACTER, WIDEST, draw
from tests.zoo import ZOO

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('x')</script>&\"\x1b[0m]]>"


def group(name: str, channels: int = 64, locked: int = 0, *reasons: str, **changes: object) -> InspectedGroup:
    row = GroupRow(name, channels, channels, locked, reasons, (name, f"{name}.twin"), ("reader",))
    return InspectedGroup(
        **{"row": row, "macs": 1000, "parameters": 10, "macs_share": 0.1, "parameters_share": 0.1, **changes}
    )


def network(groups, edges=(), inputs=(), outputs=()) -> Inspection:
    linked = tuple(Edge(*pair) for pair in edges)
    return Inspection("Net", Cost(1_810_000_000, 11_700_000), Cost(1, 1), tuple(groups), linked, inputs, outputs)


def residual(count: int) -> Inspection:
    """A stream that every other group reads and writes, and a group that is returned."""
    names = [f"layer{place}.conv" for place in range(count)]
    pairs = [pair for name in names[1:-1] for pair in ((names[0], name), (name, names[0]))]
    return network(map(group, names), [*pairs, (names[0], names[-1])], (names[0],), (names[-1],))


def dense(count: int) -> Inspection:
    """Every group reads all before it."""
    names = [f"layer{place}.conv" for place in range(count)]
    return network(map(group, names), itertools.combinations(names, 2), (names[0],), (names[-1],))


def traced(name: str) -> Inspection:
    return recoup.inspect(ZOO[name].build(6), ZOO[name].batch(2))


NETWORKS = {
    **{f"residual {count}": (lambda count=count: residual(count)) for count in (3, 5, 150)},
    "dense 30": lambda: dense(30),
    **{name: (lambda name=name: traced(name)) for name in ("residual", "concat", "gates", "shared", "several")},
}


@pytest.fixture(params=NETWORKS, scope="module")
def seen(request) -> Inspection:
    return NETWORKS[request.param]()


def parsed(inspection: Inspection) -> ET.Element:
    return ET.fromstring(draw(inspection))


def of_class(root: ET.Element, kind: str) -> list[ET.Element]:
    return [element for element in root.iter() if kind in element.get("class", "").split()]


def titles(elements: list[ET.Element]) -> list[str]:
    return [element.findtext(f"{SVG}title", "") for element in elements]


def numbers(rect: ET.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
    return x, y, width, height


def test_every_group_appears_once(seen):
    drawn = of_class(parsed(seen), "group")
    assert [title.splitlines()[0] for title in titles(drawn)] == [found.row.name for found in seen.groups]
    assert all(len(of_class(one, "box")) == 1 for one in drawn)


def test_boxes_do_not_overlap(seen):
    boxes = [numbers(rect) for rect in of_class(parsed(seen), "box")]
    assert len(boxes) == len(seen.groups)
    for (x, y, wide, high), (x2, y2, wide2, high2) in itertools.combinations(boxes, 2):
        assert x + wide < x2 or x2 + wide2 < x or y + high < y2 or y2 + high2 < y


def test_every_edge_has_one_line_that_says_what_it_is(seen):
    said = titles(of_class(parsed(seen), "edge"))
    place = {found.row.name: number for number, found in enumerate(seen.groups)}
    expected = []
    for edge in seen.edges:
        verb = "writes into" if place[edge.source] > place[edge.target] else "is read to make"
        expected.append(f"{edge.source} {verb} {edge.target if edge.source != edge.target else 'itself'}")
    assert sorted(said) == sorted(expected)


def test_additions_and_gates_have_a_dot(seen):
    dots, place = of_class(parsed(seen), "join"), [found.row.name for found in seen.groups]
    written = [edge for edge in seen.edges if place.index(edge.source) > place.index(edge.target)]
    assert len(dots) == len(written) + 1  # one is in the legend


def test_everything_is_on_the_canvas(seen):
    root = parsed(seen)
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    (graph,) = (one for one in root.findall(f"{SVG}g") if of_class(one, "group"))
    left, top = (float(number) for number in re.findall(r"[\d.]+", graph.get("transform", "")))
    for x, y, wide, high in map(numbers, of_class(graph, "box")):
        assert left + x >= 0 and left + x + wide <= width and top + y > 100 and top + y + high <= height


def test_the_same_every_time(seen):
    assert draw(seen) == draw(seen)


def test_needs_nothing_from_outside(seen):
    text = draw(seen)
    tags = {element.tag.removeprefix(SVG) for element in ET.fromstring(text).iter()}
    assert not {"script", "image", "foreignObject", "use", "a"} & tags
    assert not re.search(r"href|@import|url\((?!#)|\bon\w+=", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_states_are_coloured():
    states = (group("a"), group("b", 64, 16, "why"), group("c", 64, 64, "because"))
    root = parsed(network(states))
    assert [rect.get("class") for rect in of_class(root, "box")] == ["box free", "box partly", "box locked"]
    style = root.findtext(f"{SVG}style", "")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for colours in (light, dark):
        looks = [re.search(rf"\.{state}[ ,][^{{]*{{ ([^}}]*)", colours)[1] for state in ("free", "partly", "locked")]
        assert len(set(looks)) == 3
    assert of_class(root, "small")[0].text == "+1"
    texts = [text.text for text in of_class(root, "small")]
    assert {"64 free", "48 of 64 free", "64 locked"} <= set(texts)


def test_the_locked_part_is_as_wide_as_the_share():
    (drawn,) = of_class(parsed(network([group("b", 64, 16)])), "group")
    (box,), (part,) = of_class(drawn, "box"), of_class(drawn, "part")
    x, _, wide, _ = numbers(box)
    part_x, _, part_wide, _ = numbers(part)
    assert part_wide == pytest.approx(wide / 4, abs=1) and part_x + part_wide == pytest.approx(x + wide, abs=1)


def test_width_grows_with_the_root_of_the_channels():
    boxes = of_class(parsed(network([group("a", 1), group("b", 25), group("c", 100)])), "box")
    widths = [numbers(box)[2] for box in boxes]
    assert widths == pytest.approx([NARROWEST + (WIDEST - NARROWEST) * root for root in (0.1, 0.5, 1.0)], abs=0.1)


def test_bars_are_shares_on_one_scale():
    groups = (group("a", macs_share=0.4, parameters_share=0.1), group("b", macs_share=0.2, parameters_share=0.3))
    root = parsed(network(groups))
    lengths = {kind: [numbers(bar)[2] for bar in of_class(root, kind)] for kind in ("macs", "parameters")}
    assert lengths["macs"] == pytest.approx([BAR_LENGTH, BAR_LENGTH / 2], abs=0.1)
    assert lengths["parameters"] == pytest.approx([BAR_LENGTH / 4, BAR_LENGTH * 3 / 4], abs=0.1)
    texts = [text.text for text in of_class(root, "small")]
    assert {"40.0%", "20.0%", "10.0%", "30.0%", "1.00 k MACs", "10 params"} <= set(texts)
    assert any("full at 40.0%" in str(note.text) for note in of_class(root, "note"))


def test_headline():
    root = parsed(network([group("a"), group("b", 64, 64, "why")]))
    assert [text.text for text in of_class(root, "heading")] == ["Net: 1.81 G MACs, 11.7 M parameters"]
    assert "1 of 2 groups prunable; 0.0% of the MACs" in str(of_class(root, "note")[0].text)


def test_the_pointer_shows_layers_and_reasons():
    (title,) = titles(of_class(parsed(network([group("conv1", 64, 16, "add meets a tensor", "so it is")])), "group"))
    assert title.splitlines() == [
        "conv1",
        "64 channels, 48 free",
        "1,000 MACs (10.00%), 10 parameters (10.00%)",
        "made by conv1, conv1.twin",
        "read by reader",
        "locked: add meets a tensor",
        "locked: so it is",
    ]


def test_many_layers_are_not_all_named():
    row = GroupRow("a", 8, 8, 0, (), tuple(f"layer{place}" for place in range(40)), ())
    (title,) = titles(of_class(parsed(network([group("a", row=row)])), "group"))
    assert "layer11 and 28 more" in title and "layer12" not in title and "read by no layer" in title


def test_names_are_escaped_everywhere():
    row = GroupRow(EVIL, 8, 8, 4, (EVIL,), (EVIL,), (EVIL,))
    hostile = network([group(EVIL, row=row), group("b")], [(EVIL, "b"), ("b", EVIL), (EVIL, EVIL)], (EVIL,), (EVIL,))
    root = parsed(
        Inspection(
            EVIL, *(getattr(hostile, name) for name in ("cost", "least", "groups", "edges", "inputs", "outputs"))
        )
    )
    clean = EVIL.replace("\x1b", "")
    assert not [element for element in root.iter() if "script" in element.tag]
    (title, _) = titles(of_class(root, "group"))
    assert title.count(clean) == 4
    assert clean in str(of_class(root, "heading")[0].text) and clean in str(root.get("aria-label"))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("features.denseblock4.denselayer16.conv1", "denselayer16.conv1"),
        ("encoder.layers.encoder_layer_11.self_attention.in_proj_weight", "11.…in_proj_weight"),
        ("encoder.stem.blocks.3.first.weight_of_it", "…3.…weight_of_it"),
    ],
)
def test_long_names_keep_numbers_and_their_end_and_fit(name, end):
    root = parsed(network([group(name, 1, 0), group("wide", 10_000)]))
    shown = str(of_class(root, "name")[0].text)
    assert shown.startswith("…") and shown.endswith(end)
    assert len(shown) * NAME_CHARACTER + len("+1 1 free") * SMALL_CHARACTER < numbers(of_class(root, "box")[0])[2]


def test_input_and_output_have_stubs_that_do_not_cover_lines():
    root = parsed(network([group("a"), group("b")], [("a", "b")], ("a", "b"), ("a", "b")))
    stubs = [path for path in of_class(root, "outside") if path.get("marker-end")]
    said = ("reads what no group holds", "the model returns")
    assert all(text in title for text, title in zip(said * 2, titles(stubs), strict=True))
    starts = [tuple(float(number) for number in re.findall(r"[\d.]+", str(path.get("d")))[:2]) for path in stubs]
    (x, y, wide, _), (_, y2, _, _) = map(numbers, of_class(root, "box"))
    middle, quarter = x + wide / 2, x + wide / 4
    assert [start[0] for start in starts] == pytest.approx([middle, quarter, quarter, middle], abs=0.1)
    assert starts[1][1] == pytest.approx(y + BOX_HEIGHT) and starts[3][1] == pytest.approx(y2 + BOX_HEIGHT)


def test_a_returned_stream_leaves_where_its_lane_ends():
    root = parsed(network([group("a"), group("b")], [("a", "b"), ("b", "a")], ("a",), ("a",)))
    stub = next(path for path in of_class(root, "outside") if "returns" in path.findtext(f"{SVG}title", ""))
    dot = of_class(root, "join")[-1]
    assert str(stub.get("d")).startswith(f"M{dot.get('cx')} {dot.get('cy')}")


def test_nothing_to_draw():
    root = parsed(network([]))
    assert not of_class(root, "group") and of_class(root, "heading")
