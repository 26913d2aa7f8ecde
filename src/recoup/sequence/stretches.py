"""Which stretches of a network can be refitted as a whole, and which of their tensors may change."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from recoup.calibrate import Calibration
from recoup.judging.sample import Sample
from recoup.sequence.cutting import Cutter
from recoup.sequence.joint import Adjustable
from recoup.sequence.lockstep import Lockstep
from recoup.structure.route import Route, Stretch, stretch_before


def stretches_of(
    calibration: Calibration, path: Route, written: Mapping[str, Tensor], span: int = 1
) -> dict[str, Stretch]:
    """By stop, the stretches that end in a layer with pruned inputs nobody else reads, each with `span` such layers."""
    structure = calibration.structure
    found: dict[str, Stretch] = {}
    starts: list[int] = []
    for stop in path.stops:
        read = [group for group in structure.groups if stop.consumer.name in group.consumers]
        if stop.consumer.weight not in written or any(len(group.consumers) > 1 for group in read):
            continue
        starts.append(stretch_before(path, structure, stop).start)
        stretch = stretch_before(path, structure, stop, starts[-span:][0])
        corrects = stop.skip is None or stop.skip in (*stretch.entries, *(n.name for n in path.nodes[stretch.start :]))
        if corrects and stretch.exits:
            found[stop.node] = stretch
    return found


def adjustable(
    calibration: Calibration,
    walk: Lockstep,
    stretch: Stretch,
    cutter: Cutter | None,
    written: Mapping[str, Tensor],
    sample: Sample,
) -> Adjustable | None:
    """The stretch with its tensors as parameters; None where it cannot be run at the size that is left."""
    if cutter is None or not cutter.runs(stretch):
        return None
    work = Adjustable(cutter, walk, stretch, _tensors(calibration, stretch, written))
    passages = walk.passages(stretch, sample.held[:1])
    is_sound = all(work.is_sound(passage) for passage in passages)
    return work if is_sound else None


def _tensors(calibration: Calibration, stretch: Stretch, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and biases of a stretch that one call of one layer uses, so that changing them changes nothing else."""
    products = calibration.structure.products
    names = [name for product in products for name in (product.weight, product.bias) if name is not None]
    own = [name for name in stretch.tensors if names.count(name) == 1]
    values = {name: written.get(name, calibration.parameters.get(name)) for name in own}
    return {name: value for name, value in values.items() if value is not None}
