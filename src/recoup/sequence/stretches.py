"""Which stretches of a network can be refitted as a whole, and what of them may change."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from recoup.calibrate import Calibration
from recoup.sequence.adjusting import Part
from recoup.structure.ledger import Product
from recoup.structure.route import Route, Stretch, stretch_before


def stretches_of(
    calibration: Calibration, path: Route, written: Mapping[str, Tensor], span: int = 1
) -> dict[str, Stretch]:
    """By stop, the stretches that end in a layer with pruned inputs nobody else reads.

    Where the layer's output is added to something, a stretch has up to `span` such layers: each can make up for what
    the others have lost. In a plain chain the value between two layers is all that the next one gets, and longer
    stretches gain nothing.
    """
    structure = calibration.structure
    found: dict[str, Stretch] = {}
    starts: list[int] = []
    for stop in path.stops:
        read = [group for group in structure.groups if stop.consumer.name in group.consumers]
        if stop.consumer.weight not in written or any(len(group.consumers) > 1 for group in read):
            continue
        starts.append(stretch_before(path, structure, stop).start)
        reach = span if stop.skip is not None else 1
        stretch = stretch_before(path, structure, stop, min(starts[-reach:]))
        is_known = stop.skip is None or stop.skip in {*stretch.entries, *(node.name for node in stretch.nodes)}
        if is_known and stretch.exits:
            found[stop.node] = stretch
    return found


def parts_of(calibration: Calibration, stretch: Stretch, tensors: Mapping[str, Tensor]) -> list[Part]:
    """The layers of a stretch, with those of `tensors` that one call uses: changing them changes nothing else."""
    products = calibration.structure.products
    names = [name for product in products for name in (product.weight, product.bias)]
    own = {name for name in tensors if names.count(name) == 1}
    inside = {node.name for node in stretch.nodes}
    layers = [product for product in products if product.node in inside]
    return [part for product in layers for part in _parts(product, own, tensors)]


def _parts(product: Product, own: set[str], tensors: Mapping[str, Tensor]) -> list[Part]:
    """One part for weight and bias, or two where their outputs are not in line, as in a grouped transposed layer."""
    weight = product.weight if product.weight in own else None
    bias = product.bias if product.bias in own else None
    if weight is None and bias is None:
        return []
    together = Part(product.node, weight, bias, product.input_dim)
    if weight is None or bias is None:
        return [together]
    rows = tensors[weight].movedim(1 if product.input_dim is None else product.input_dim, 1).shape[0]
    if rows == len(tensors[bias]):
        return [together]
    return [Part(product.node, weight, None, None), Part(product.node, None, bias, None)]
