"""What makes the channels of a group: filters, and the batch norms that the channels pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from recoup.algebra.selection.elimination import rows_by_channel
from recoup.channels.parts import spread
from recoup.channels.structure import Group
from recoup.graph.activation import activation_behind
from recoup.operators.names import operation_name
from recoup.statistics.calibrate import Calibration

# The operands of a batch norm: input, weight, bias, mean, variance, training, momentum, eps.
_WEIGHT, _VARIANCE, _EPS = 1, 4, 7


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """A batch norm in the graph: the names of its factors γ and of its variances, and eps."""

    scale: str
    variance: str
    eps: float


def filters_of(calibration: Calibration, group: Group, *, folded: bool = False) -> Tensor:
    """The weights that produce each channel (width, f), all producers side by side; f = 0 where there is none.

    Grouped convolutions are producers, and so are embeddings, by the columns of their tables.
    With `folded`, each is multiplied by the factor γ / σ of the batch norm that alone reads what it makes.
    """
    structure = calibration.structure
    sites = {(site.tensor, site.dim): site for site in structure.sites}
    found = []
    for (name, dim), node in _makers(calibration).items():
        # A computed weight that loses nothing has no place in the class, nor a layer that nobody reads in a graph.
        if (name, dim) not in sites or name not in calibration.parameters:
            continue
        site = sites[name, dim]
        weight = spread(calibration.parameters[name], site.runs).movedim(dim, 0).flatten(1)
        factor = _factor_behind(calibration, node) if folded else None
        weight = weight if factor is None or len(factor) != len(weight) else weight * factor[:, None]
        rows = rows_of_group(group, weight, site.channel_of.flatten())
        found += [] if rows is None else [rows]
    return torch.cat(found, dim=1) if found else torch.zeros(group.width, 0)


def _makers(calibration: Calibration) -> dict[tuple[str, int], str]:
    """Every weight that makes channels and the dim they lie along, with the first node that multiplies by it."""
    captured = calibration.traced.standalone.captured
    makers: dict[tuple[str, int], str] = {}
    for product in calibration.structure.products:
        makers.setdefault((product.weight, product.output_dim), product.node)
    for node in captured.graph.nodes:
        if node.op != "call_function" or operation_name(node.target) != "embedding":
            continue
        table = captured.tensors.get(node.args[0].name) if isinstance(node.args[0], fx.Node) else None
        if table is not None:
            makers.setdefault((table, 1), node.name)
    return makers


def scales_of(calibration: Calibration, group: Group) -> Tensor:
    """The factors γ (width, m) of every batch norm that the group's channels pass, as they are."""
    sites = {site.tensor: site.channel_of for site in calibration.structure.sites if site.dim == 0}
    names = dict.fromkeys(norm.scale for norm in _norms(calibration) if norm.scale in sites)
    columns = (rows_of_group(group, calibration.parameters[name][:, None], sites[name]) for name in names)
    found = [column for column in columns if column is not None]
    return torch.cat(found, dim=1) if found else torch.zeros(group.width, 0)


def rows_of_group(group: Group, weight: Tensor, channel_of: Tensor) -> Tensor | None:
    """What a weight (rows, ...) holds for each channel of the group (width, f); None if it makes none of them.

    A channel that consists of several rows, such as a head, has them side by side, and zeros where others have more.
    """
    inside = (channel_of >= group.start) & (channel_of < group.start + group.width)
    if not bool(inside.any()):
        return None
    local = torch.where(inside, channel_of - group.start, -1).to(weight.device)
    rows, is_row = rows_by_channel(local, group.width, torch.ones_like(local, dtype=torch.bool))
    return (weight.flatten(1)[rows] * is_row[:, :, None]).flatten(1)


def _factor_behind(calibration: Calibration, node: str) -> Tensor | None:
    """γ / σ of the batch norm right behind a layer, for each of its outputs."""
    captured = calibration.traced.standalone.captured
    behind = activation_behind(captured, node).nodes[:1]
    norm = _norm(behind[0], captured.tensors) if behind else None
    if norm is None:
        return None
    scale, variance = (calibration.parameters[name].double() for name in (norm.scale, norm.variance))
    return (scale * (variance + norm.eps).rsqrt()).to(calibration.parameters[norm.scale].dtype)


def _norms(calibration: Calibration) -> Iterator[BatchNorm]:
    captured = calibration.traced.standalone.captured
    found = (_norm(node, captured.tensors) for node in captured.graph.nodes if node.op == "call_function")
    return (norm for norm in found if norm is not None)


def _norm(node: fx.Node, tensors: Mapping[str, str]) -> BatchNorm | None:
    """The batch norm that a node is, if it is one with factors and statistics of its own."""
    if operation_name(node.target) != "batch_norm":
        return None
    read = (node.args[_WEIGHT], node.args[_VARIANCE])
    names = [tensors.get(value.name) for value in read if isinstance(value, fx.Node)]
    if len(names) < 2 or names[0] is None or names[1] is None:
        return None
    eps = node.args[_EPS]
    return BatchNorm(names[0], names[1], float(eps))  # type: ignore[arg-type]  # a number in every call
