"""Segments of a network that can be refitted as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from recoup.channels.structure import Structure
from recoup.graph.expressions import FUNCTIONS
from recoup.operators.names import is_random
from recoup.operators.record import operator_of, weights_of
from recoup.recovery.schedule import RefitPoint, Schedule
from recoup.statistics.calibrate import Calibration


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Operations from `start` to before `end` of a schedule: up to a refit `point` and what acts on its output alone.

    `nodes` are its operations, after those that count samples for them. `entries` are the values it reads from before,
    `exits` those of its own that are read after, `tensors` the weights and biases of its layers.
    """

    point: RefitPoint
    start: int
    end: int
    nodes: tuple[fx.Node, ...]
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    tensors: tuple[str, ...]


def segment_before(schedule: Schedule, structure: Structure, point: RefitPoint, start: int | None = None) -> Segment:
    """The segment from `start`, or the layer that last made some of the point's inputs, to the next layer behind it."""
    calls = {product.node for product in structure.products}
    here = schedule.place(point.node)
    if start is None:
        start = max((schedule.place(node) for node in _makers(schedule, structure, point)), default=here)
    end = next(n for n in range(here + 1, len(schedule.nodes)) if _ends(schedule.nodes[n], calls))
    return _segment(schedule, structure, point, start, end)


def whole_segment(schedule: Schedule, structure: Structure) -> Segment:
    """All of the network, from its inputs to its outputs, which are in the order they are returned in."""
    found = _segment(schedule, structure, schedule.points[-1], 0, len(schedule.nodes) - 1)
    returned = [value.name for value in schedule.nodes[-1].all_input_nodes]
    return replace(found, exits=tuple(sorted(found.exits, key=returned.index)))


def segments_of(
    calibration: Calibration, schedule: Schedule, written: Mapping[str, Tensor], span: int = 1
) -> dict[str, Segment]:
    """By refit point, the segments that end in a layer with pruned inputs nobody else reads.

    Where the layer's output is added to something, a segment has up to `span` such layers: each can make up for what
    the others have lost. In a plain chain the value between two layers is all that the next one gets, and longer
    segments gain nothing.
    """
    structure = calibration.structure
    found: dict[str, Segment] = {}
    starts: list[int] = []
    for point in schedule.points:
        alone = segment_before(schedule, structure, point)
        if point.consumer.weight not in written or not _has_all_readers(alone, structure, point):
            continue
        starts.append(alone.start)
        reach = span if point.skip is not None else 1
        segment = segment_before(schedule, structure, point, min(starts[-reach:]))
        is_known = point.skip is None or point.skip in {*segment.entries, *(node.name for node in segment.nodes)}
        if is_known and segment.exits:
            found[point.node] = segment
    return found


def _has_all_readers(segment: Segment, structure: Structure, point: RefitPoint) -> bool:
    """Whether the segment has all that reads what the point's layer does: that layer, and recurrent ones that make it.

    A recurrent layer does not end one, as it has several points.
    """
    several = {node.name for node in segment.nodes if len(weights_of(node)) > 1}
    read = (group for group in structure.groups if point.consumer.name in group.consumers)
    others = (consumer for group in read for consumer in structure.consumers_of(group))
    return point.node not in several and all(
        other.name == point.consumer.name or other.node in several for other in others
    )


def last_needs(schedule: Schedule, segments: Iterable[Segment] = ()) -> dict[str, str]:
    """For every value the last node that needs it, by name; a refit point needs its skip, a segment what enters it."""
    skips = {point.node: point.skip for point in schedule.points if point.skip is not None}
    ends: dict[str, list[Segment]] = {}
    for segment in segments:
        ends.setdefault(schedule.nodes[segment.end].name, []).append(segment)
    last: dict[str, str] = {}
    for node in schedule.nodes:
        last |= dict.fromkeys((value.name for value in node.all_input_nodes), node.name)
        if node.name in skips:
            last[skips[node.name]] = node.name
        for segment in ends.get(node.name, ()):
            last |= dict.fromkeys(segment.entries, node.name)
    return last


def _segment(schedule: Schedule, structure: Structure, point: RefitPoint, start: int, end: int) -> Segment:
    own = [node for node in schedule.nodes[start:end] if node.op == "call_function"]
    inside = [*_counters(schedule, own), *own]
    names = {node.name for node in inside}
    read = {value for node in inside for value in node.all_input_nodes if value.op in ("call_function", "placeholder")}
    entries = tuple(sorted(value.name for value in read if value.name not in names))
    exits = tuple(node.name for node in own if not _counts(node) and any(user.name not in names for user in node.users))
    layers = [product for product in structure.products if product.node in names]
    tensors = [name for product in layers for name in (product.weight, product.bias) if name is not None]
    return Segment(point, start, end, tuple(inside), entries, exits, tuple(dict.fromkeys(tensors)))


def _counters(schedule: Schedule, inside: list[fx.Node]) -> list[fx.Node]:
    """Operations from before that tell the ones inside how many samples there are, or fill tensors of that size."""
    needed = set(inside)
    for node in reversed(schedule.nodes):
        if (_counts(node) or _fills(node)) and any(user in needed for user in node.users):
            needed.add(node)
    return [node for node in schedule.nodes if node in needed and node not in inside]


def _counts(node: fx.Node) -> bool:
    """Whether a node gives a number, not a tensor: a size, or arithmetic on sizes."""
    is_arithmetic = node.op == "call_function" and node.target in FUNCTIONS.values()
    return is_arithmetic or (node.op == "call_function" and operator_of(node.target).gives_number)


def _fills(node: fx.Node) -> bool:
    """Whether a node makes a tensor of sizes alone, as the state that a recurrent layer begins with."""
    is_call = node.op == "call_function" and not node.is_impure()
    return is_call and not is_random(node) and all(_counts(source) for source in node.all_input_nodes)


def _ends(node: fx.Node, calls: set[str]) -> bool:
    return node.op == "output" or node.name in calls


def _makers(schedule: Schedule, structure: Structure, point: RefitPoint) -> list[str]:
    """Calls, before the point, of the layers that make channels it reads."""
    read = {group.name for group in structure.groups if point.consumer.name in group.consumers}
    makers = {name for group in structure.groups if group.name in read for name in group.producers}
    here = {node.name for node in schedule.nodes[: schedule.place(point.node)]}
    return [p.node for p in structure.products if p.weight.removesuffix(".weight") in makers and p.node in here]
